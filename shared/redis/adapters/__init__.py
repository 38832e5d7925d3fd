"""Adapter versions in Redis: bytes, manifests and the pointer `latest`.

`store.py` first: publish, read, move, pin, delete. It builds on `catalog.py`, the reading side. `watch.py` follows the
pointers, for workers. `splits.py` has the splits of an adapter's requests over its versions, and gives their verdicts.
"""
