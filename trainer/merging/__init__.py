"""An adapter merged into its base: a model folder that needs no adapter any more.

`merge.py` goes from a base folder and an adapter to a new folder, `fuse.py` computes the weights. `python -m
trainer.merging` is what `mlx_parallm adapters merge` starts.
"""
