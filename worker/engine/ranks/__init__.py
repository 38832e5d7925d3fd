"""Several ranks that are one engine: each holds a part of every layer, and all take the same turns.

`ranks.py` first: the group of MLX that the ranks sum over. `turns.py`: what a turn takes from the world, so that all
ranks do the same in it. `sharding.py`: a rank's part of a model.
"""
