"""A trainer's access to its ring: through Redis, or through an api alone.

`ring.py` first: what a run uses of its ring. `join.py` finds the way to it. `over_redis.py` and `over_http.py` (with
`http_client.py`) are the two ways for samples and versions; `board.py` says how the run goes, `mailbox.py` takes users'
orders; `feedback.py` asks for users' preferences.
"""
