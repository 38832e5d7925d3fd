"""Networks that are no language models: what one is, and what goes in and out of it; without code, without MLX.

`spec.py` first: layers by name, inputs and outputs. `shapes.py` works out every shape, tensor and cost of a network,
and refuses what does not fit. `tensors.py` has named tensors: how a row carries them, and whether they
are what is wanted.
"""
