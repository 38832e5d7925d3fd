"""Everything that `mlx_parallm_serve` starts: Redis, api, job runner and workers of one machine, as child processes.

`main.py` says which child processes there are, `supervisor.py` starts, watches and stops them. `embedded_redis.py`
starts our own Redis, and `watchdog.py` stops that server when its parent process has ended.
"""
