"""Keys and values that outlive their row.

`prefix_cache.py` first: prompts' KV, found again by block hashes. `slabs.py` copies several rows at once. A new kind of
KV belongs here.
"""
