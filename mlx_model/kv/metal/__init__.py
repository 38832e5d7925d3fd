"""Kernels for Metal that read and write the packed KV of decode steps: `attention.py` calls the others."""
