"""Where a learner computes: one mechanism for this process's thread, a worker's engine, ranks, and the service.

`handle.py` first: what a run sees of its learner. `kinds.py` builds one from plain data, `ranks.py` has the ranks of a
group carry out each call together. What a call is, and which methods may be called, is in trainer/learn/calls.py.
"""
