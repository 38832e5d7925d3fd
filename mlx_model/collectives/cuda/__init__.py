"""Sums over ranks of one machine on CUDA, small ones, through memory that the ranks' GPUs share.

`memory.py` makes that memory, `sums.py` calls the kernel `sum.cu`, and says how it works.
"""
