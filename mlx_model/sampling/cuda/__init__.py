"""A draw on CUDA in one kernel, in place of eight operations of MLX's: `draws.py`, with `drawn.cu`."""
