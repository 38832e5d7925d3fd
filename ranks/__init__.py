"""Several processes, on one machine or on several, that are one worker or trainer: each rank has a part of the model.

To Redis a group is one worker with one id: rank 0, an ordinary `WorkerProcess`, which alone claims, renews and
publishes. The other ranks *follow*: each runs the same engine and takes every turn that rank 0 takes, with the same
orders (worker/engine/orders.py) and the same facts (worker/engine/turns.py), which rank 0 sends before it begins
the turn itself. So all ranks call the same collectives in the same order. Units of a learner's work travel like turns:
of a trainer that the worker hosts, or of one whose processes are a group of their own (trainer/learners/group.py).

Two connections lead from a follower to rank 0, both after a handshake by the ring's secret (shared/wire.py).
*turns*: from thread G to thread G, one way, blocking: nothing stands between rank 0's decision and a follower's turn.
*talk*: between the event loops, both ways: life signs, what has been read, files of adapters to fetch.

In order of reading: `placement.py` (which rank of what we are), `meeting.py` (how ranks find one another by Redis),
`messages.py`, `channel.py` (of turns), `lead.py` (rank 0's side) with `followers.py` (the others as it sees them),
`following.py` (a follower's process), `children.py` (followers on rank 0's own machine), `backend.py` (MLX's side of
it). What only a worker's ranks do is in worker/group/, what only a trainer's do in trainer/learners/group.py.

What ends a rank ends the group: rank 0 gives its sequences back, which go on elsewhere, and all begin anew. Nothing is
mended while it runs, because a collective that has begun with a rank cannot end without it.
"""
