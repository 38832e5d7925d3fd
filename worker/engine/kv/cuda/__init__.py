"""Kernels that read KV in decode steps on CUDA, where MLX's own are slow.

`attention.py` calls them and says how they work; `read.cu`, `tiles.cu`, `join.cu` and `pack.cu` are their bodies,
`eight.cuh` and `tensor_cores.cuh` what goes before them.
"""
