"""A learner on a model that several ranks divide: each rank has one, and all do the same, as rank 0 asks.

What a learner does follows from plain data alone, so rank 0 sends the others what it is asked itself (`work.py`),
before it does so: batches, weights to go on from. Weights and moments are whole on every rank, gradients are sums
over ranks (worker/engine/model/learning.py). Rank 0's learner is `learner.py`, in `trainer/tuning/led.py` that of a
data set; `trainer/group/` has the other ranks' side.
"""
