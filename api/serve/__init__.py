"""One machine with all its processes, `mlx_parallm_serve`: Redis, api, job runner and workers as its children.

`main.py` says which children there are, `supervisor.py` starts, watches and stops them. `embedded_redis.py` is the
Redis of our own, which `watchdog.py` ends when we are gone.
"""
