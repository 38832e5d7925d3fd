"""Anthropic's Messages, answered as a chat: the same prompt, plan, queue and tokens as /v1/chat/completions.

`body.py` reads a request and writes the chat that it comes to, with `turns.py` for its messages, `planning.py` makes
work of it, `routes.py` answers it, `message.py` writes the message, with `blocks.py` for its content blocks and their
events. Errors get Anthropic's shape where all errors get theirs, in `api/http/anthropic_errors.py`. Message Batches are
batches (`api/batches`).
"""
