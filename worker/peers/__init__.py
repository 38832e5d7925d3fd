"""KV that one worker of a ring fetches from another, over a TCP connection of their own.

Read `exchange.py` first: what the worker's process uses. Then `fetching.py`: from a claimed sequence to KV in our
cache, with `pace.py` (is it quicker than computing?) and `directory.py` (who has it, where, and the ring's secret). On
the wire: `messages.py` over shared/wire.py (handshake, authentic frames), `server.py` and `client.py`, both over
`listening.py`, which hosts use for weights, too, and over `store.py`, which speaks to the engine's thread. What is in a
parcel is the engine's business: `engine/prefixes/sharing.py`.
"""
