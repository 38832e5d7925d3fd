"""OpenAI's endpoints, with vLLM's extras. Each route's file reads its body, plans, and hands over to `generation/`.

Read a chat first: `chat.py` (the route), `bodies.py` (its body), `conversations.py`, `fitting.py` and `tools.py`
(messages to prompt ids), `text_forms.py` (the forms of custom tools' texts), `replies.py` (stream or whole answer),
`chunks.py` (the bytes of a stream's chunk).

Then the others: `completions.py`, `responses/`, `embeddings.py`, `classifications.py`, `models.py` with
`codex_models.py`; in vLLM's form `similarities.py`, `render.py`, `abortions.py`.
"""
