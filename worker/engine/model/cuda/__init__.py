"""Kernels of ours for a model's forward on CUDA."""
