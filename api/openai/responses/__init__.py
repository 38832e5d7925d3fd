"""POST /v1/responses: OpenAI's newer way to ask, answered as a chat.

`body.py` turns the request into a chat request, with `turns.py` for its input, `routes.py` answers it, `items.py`
writes the output items and their events.
"""
