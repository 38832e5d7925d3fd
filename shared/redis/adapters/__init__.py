"""Adapter versions in Redis: bytes, manifests and the pointer `latest`.

`store.py` first: publish, read, move, pin, delete. It builds on `catalog.py` (reading) and `bytes.py` (chunks up and
down). `watch.py` follows the pointers, for workers.
"""
