"""Adapter versions of a run: gated, published, kept, taken back.

`served.py` first: which version is served. `publish.py` brings one to the store, `examine.py` asks a worker about it,
`foreign.py` handles a version that somebody else made the latest, `posted.py` compares log-probabilities that users
post, `start.py` fetches the one that a run begins with. On disk: `checkpoint.py`, `disk.py` (a full disk is waited
for), `run_lock.py` (one trainer a folder), `run_folder.py` (whose it is).
"""
