"""Subcommands of `mlx_parallm`, one module a noun."""
