"""`mlx_parallm doctor`: what on this machine would keep a ring from running well, and what to do about it.

Read in this order: `finding.py` (one result), `machine.py`, `network.py`, `model.py` (checks of a subject each, which
change nothing), `tuning.py` (measurements and tries, in a process that loads MLX). The command is `api/cli/doctor.py`.
"""
