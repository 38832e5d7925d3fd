"""The host: one process of a machine, which starts and ends a worker for each model that the machine is to hold.

`placement.py` decides which models these are, from facts that every host reads alike.
"""
