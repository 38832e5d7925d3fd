"""Adapters for the rows of one batch, each row with its own version.

Read in this order: `stacks.py` (the model with room for adapters), `layers.py` (the layers that compute with them),
`deltas.py` (what they add), `kernels.py` (fused GPU kernels), `reader.py` (files to arrays, in a thread of its own).
Which version is in which slot: worker/engine/adapter_slots.py.
"""
