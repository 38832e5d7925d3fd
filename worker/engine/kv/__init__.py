"""Keys and values that outlive their row.

`prefix_cache.py` first: prompts' KV, found again by block hashes. `slabs.py` copies several rows at once, `unkept.py`
spreads a burst's copies over some steps. A new kind of KV belongs here.
"""
