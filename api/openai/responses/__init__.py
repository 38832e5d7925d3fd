"""/v1/responses, OpenAI's newer way to ask, answered as a chat; and /v1/conversations.

`routes.py` has the routes of responses. `body.py` is the request, with `turns.py` and `parts.py` for its input and
`tools.py` for its tools; `history.py` and `references.py` find what was said before, `messages.py` and `planning.py`
make a chat and work of all, `writer.py` with `items.py` writes the response and its events, `storage.py` stores it.
`background.py` goes on with responses whose clients do not wait, `compaction.py` shortens a conversation,
`conversations.py` has the routes of conversations.
"""
