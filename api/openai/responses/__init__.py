"""POST /v1/responses: OpenAI's newer way to ask, answered as a chat.

`turns.py` reads the input as turns of a chat, `body.py` makes a chat request of the whole, `routes.py` answers it,
`items.py` writes the output items and their events.
"""
