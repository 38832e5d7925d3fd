"""Kernels of ours for a model's decode step on CUDA, in place of several operations of MLX's.

`products.py` with `product.cu` (few rows), `product_many.cu` and `product_sum.cu`: products, the MLP's gate after one,
and what lies between one and the next. `rotary.py` with `rotary.cu`: norms and positions of queries and keys, and where
they are written.
"""
