"""The processes that compute rewards: in fair turns, within a time, killed when they hang.

Read `pool.py`, then `shares.py` (who asks) and `process.py` (the process itself). `score.py` takes any reward,
`served.py` those that a served model gives.
"""
