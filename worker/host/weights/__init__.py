"""Weights that one host of a ring gets from another in place of the hub: by hash, resumed where they were cut off.

`exchange.py` is what the host uses; `files.py` says which files of a model go and how they are asked for, `giver.py`
and `taker.py` are the two sides, on connections that only processes of the ring can open (shared/wire.py).
"""
