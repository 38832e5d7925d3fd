"""Ollama's API, answered as chats and completions: the same prompt, plan, queue and tokens as OpenAI's endpoints.

`body.py` reads a request and writes the chat that it comes to, with `turns.py` for its messages; `lines.py` writes the
lines of an answer; `routes.py` answers what generates, `vectors.py` what embeds, `models.py` what is served. Errors get
Ollama's shape where all errors get theirs, in `api/http/ollama_errors.py`.
"""
