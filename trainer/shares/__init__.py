"""Train steps whose gradients several processes compute: `--learner shared`, and `--join-run` beside it.

Read `leader.py` first: a run's learner, which gives each process its part of a step, adds the gradients up, and alone
changes the weights. `member.py` is the process that takes part; it keeps nothing between two steps but the base.
`part.py` is what both compute, in the MLX thread; `division.py` who gets which samples; `messages.py` what is said,
`exchange.py` how it travels through Redis (shared/redis/training/shared_runs.py).
"""
