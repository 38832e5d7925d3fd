"""The continuous batch on MLX: one thread owns the model, plain data goes in and comes out (thread.py)."""
