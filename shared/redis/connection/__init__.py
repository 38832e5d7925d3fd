"""Connections to Redis: made here, and nowhere else.

`client.py` first: clients that survive a restart, and Lua scripts by name. `address.py` reads URLs, `sentinel.py`
follows a primary. `cluster.py` is a client of a Redis Cluster: `routing.py` says which slot a command goes to,
`topology.py` who has that slot, `subscription.py` listens there. `cancelling.py` keeps a cancellation from being lost,
`background_reader.py` reads in a task of its own, `faults.py` says which words of an error may be shown.
"""
