"""Adapter versions in Redis: bytes, manifests and the pointer `latest`.

`store.py` first: publish, read, move, delete. It builds on `catalog.py` (reading), `bytes.py` (chunks up and down) and
`pins.py` (who uses a version). `watch.py` follows the pointers, for workers. `splits.py` has the splits of an adapter's
requests over its versions, and gives their verdicts.
"""
