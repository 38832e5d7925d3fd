"""An adapter merged into its base: a model folder that needs no adapter any more.

`merge.py` goes from a base folder and an adapter to a new folder, `fuse.py` computes the weights, `whole_folder.py`
sees that the new folder is there whole or not at all. `python -m trainer.merging` is what `mlx_parallm adapters merge`
starts.
"""
