"""Durable jobs in Redis: submitted, leased, recorded, ended.

`store.py` is for those who submit and poll, with `intake.py` for the submission itself and `images.py` for its images.
`ledger.py` is for the job runner: lease, cursor, results, end. `ticks.py` wakes a runner through arq, `pins.py` keeps
the adapter versions that a job names.
"""
