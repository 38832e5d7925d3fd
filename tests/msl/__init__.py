"""Runs kernels written for Metal on the CPU: `shim.h` is their language in C++, `shim.py` compiles and calls them."""
