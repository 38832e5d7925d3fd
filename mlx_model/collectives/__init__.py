"""What the ranks of one model exchange within a forward, and what they agree on at start.

`ranks.py` first: the group of MLX that the ranks sum over. `cuda/`: sums of decode steps through memory that the GPUs
of one machine share. A rank's part of a model is made in `mlx_model/sharding.py` or `mlx_model/pipeline.py`; how ranks
find one another, and are lost, is in `ranks/`.
"""
