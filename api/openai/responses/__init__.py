"""/v1/responses, OpenAI's newer way to ask, answered as a chat; and /v1/conversations.

`routes.py` has the routes of responses. `body.py` is the request, with `turns.py` for its input; `history.py` finds
what was said before, `planning.py` makes a chat and work of both, `writer.py` with `items.py` writes the response and
its events, `kept.py` keeps it. `background.py` goes on with responses whose clients do not wait, `conversations.py`
has the routes of conversations.
"""
