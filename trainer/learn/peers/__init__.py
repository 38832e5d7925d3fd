"""Several that compute one train step, each of its own samples.

`division.py` says who gets which of them; `peers.py` is a rank among others that each have all of the model: it adds up
what they have made of theirs. Processes that do so through Redis are in trainer/shares.
"""
