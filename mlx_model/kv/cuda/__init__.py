"""Attention on CUDA: kernels that read KV in decode steps, where MLX's own are slow, and prompts in few shapes.

`attention.py` calls them and says how they work, `place.py` which KV is read and written in place, `beginnings.py` what
each block reads where rows begin alike; `read.cu`, `tiles.cu`, `join.cu` and `pack.cu` are their bodies, `eight.cuh`,
and `tensor_cores.cuh` and `pack.cuh` of `mlx_model/cuda`, what goes before them. `few_shapes.py` is about prompts.
"""
