"""Adapter versions on their way from the store into the engine: `sync.py` follows what is published, and acknowledges
what is loaded; `cache.py` keeps the files on disk, within a bound, for all workers of a machine.
"""
