"""A learner of several ranks, which divide the model or a train step's samples: each has one, and does as rank 0 asks.

What a learner does follows from plain data alone, so rank 0 sends the others what it is asked itself (`work.py`),
before it does so: batches, weights to go on from. Weights and moments are whole on every rank, gradients are sums
over ranks (worker/engine/model/learning.py; trainer/learn/peers where each rank has all of the model). Rank 0's learner
is `learner.py`, in `trainer/tuning/led.py` that of a data set; `trainer/group/` has the other ranks' side.
"""
