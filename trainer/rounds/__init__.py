"""Runs whose data stays where it is: each learns alone, and every `--sync-every` steps they average their weights.

Read `learner.py` first: a run's learner that does so. `federation.py` is the run's side of a round, `average.py` what
the average is; the store is shared/redis/training/rounds.py.
"""
