"""A trainer of several ranks, which divide a model that is too large for one of them, or the samples of a train step.

`placing.py` says which rank a process is. Rank 0 is the trainer as ever (`lead.py`): it alone has a run, talks to the
ring and writes files. The others follow it, each a process of its own on this machine or on another (`follower.py`); in
a worker that hosts a trainer they are the worker's ranks. What they compute is in `rank.py`, which rank 0 asks by
`trainer/ranks/`. How ranks meet, what travels between them and what their loss means are a worker's: worker/group/.
"""
