"""Whose work a task does, and that caller's fair share of this process.

`caller.py`: the API key and the client of the request, in context variables. `fair_pool.py`: threads and places for
work whose time depends on what a client sent; the keys take turns.
"""
