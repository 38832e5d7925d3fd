"""Data that is stored between two requests: `response_store.py` has responses, `conversation_store.py` conversations,
`answer_store.py` answers that wait for feedback, `episode_store.py` the turns of live conversations,
`session_store.py` the state of recurrent policies, `image_store.py` images that wait for workers, and `kept_things.py`
what all have in common.

Invariants. Everything belongs to one keeper (a tenant, or an API key), whose digest stands in the names of the keys: a
name of another keeper's thing finds nothing. What a keeper has together stays within a bound of bytes: the things that
were used longest ago go first, but none that still runs. A response ends once.
"""
