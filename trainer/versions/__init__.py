"""Adapter versions of a run on their way to the store, and what the run's folder holds of them.

`publish.py` brings a version through the gate to the store, `start.py` fetches the one that a run begins with. On disk:
`checkpoint.py`, `disk.py` (a full disk is waited for), `run_lock.py` (one trainer a folder), `run_folder.py` (whose it
is). Which version a run of `--mode rl` serves is in `trainer/runs/served.py`.
"""
