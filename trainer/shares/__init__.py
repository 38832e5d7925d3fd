"""Train steps whose gradients several processes compute: `--learner shared`, and `--join-run` beside it.

Read `leader.py` first: a run's learner that alone changes the weights; `step.py` is one train step of it: each process
gets its part, and the gradients are added up. `member.py` is the process that takes part; it keeps nothing between two
steps but the base. `part.py` is what both compute, in the MLX thread; `division.py` who gets which samples;
`joining.py` what a member must have in common with the run; `messages.py` what is said, `exchange.py` how it travels
through Redis (shared/redis/training/shared_runs.py).
"""
