"""What `mlx_parallm_serve` starts: Redis, api, job runner and workers of one machine, as child processes.

`main.py` says which children there are, `supervisor.py` starts, watches and stops them. `embedded_redis.py` is the
Redis of our own, which `watchdog.py` ends when we are gone.
"""
