"""Kernels of ours for a model's decode step on CUDA, in place of several operations of MLX's.

`products.py` with `product.cu` (few rows) and `product_many.cu`: products, and the MLP's gate behind one. `rotary.py`
with `rotary.cu`: norms and positions of queries and keys, and where they are written.
"""
