"""The contracts between the processes: types, Redis keys, errors and settings.

Nothing here imports mlx or FastAPI, so every process can afford to import all of it.
"""
