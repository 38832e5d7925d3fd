"""Adapters over HTTP: list, upload, download, roll back, delete.

`routes.py` has the endpoints, ours and those of other servers, `bodies.py` what they take and give; `splits.py` begins,
shows and ends the split of an adapter's requests over its versions. `intake.py` checks the files of an upload, or of a
folder on this host, before `shared/redis/adapters/store.py` publishes them.
"""
