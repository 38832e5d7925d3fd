"""Layers around every route: who may ask, how much, and how an answer or an error looks.

Guards, from the outside in (`api/app.py` puts them up): `context.py` (request id and access log), `hosts.py` (host
names of this server), `auth.py` with `api_keys.py` (API keys), `api/admission.py` (rates and requests under
way), `limits.py` (size and time of bodies). `connections.py` bounds slow clients below all of them, and
`listening.py` has the sockets. `check_exposure`
refuses to listen on a network without a key.

For routes: `bodies.py` (long bodies are read off the event loop), `fields.py` (field types of request bodies),
`content.py` (parts of messages), `errors.py` (every error as OpenAI's object; `anthropic_errors.py`: as Anthropic's,
`ollama_errors.py`: as Ollama's)
and `sse.py` (server-sent events: bytes to the client).
"""
