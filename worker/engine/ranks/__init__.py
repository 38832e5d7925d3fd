"""Several ranks that are one engine: each holds a part of the model, and all take the same turns.

`ranks.py` first: the group of MLX that the ranks sum over. `turns.py`: what a turn takes from the world, so that all
ranks do the same in it, and what they may not do. A rank's part of a model is made in
`worker/engine/model/sharding.py` or `worker/engine/model/pipeline.py`. `cuda/`: sums of decode steps through
memory that the GPUs of one machine share.
"""
