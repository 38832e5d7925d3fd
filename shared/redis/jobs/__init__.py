"""Durable jobs in Redis: what was submitted, how far it is, what has come out.

`store.py` is for those who submit and poll, with `intake.py` for the submission itself. `ledger.py` is for the job
runner: lease, cursor, results, end. `ticks.py` wakes a runner through arq.
"""
