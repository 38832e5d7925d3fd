"""Adapter versions in Redis: bytes, manifests and the pointer `latest`.

`store.py` first: publish, read, move, delete. It builds on `catalog.py` (reading), `pins.py` (who uses a version) and
`bytes.py` (chunks up and down). `watch.py` follows the pointers, for workers.
"""
