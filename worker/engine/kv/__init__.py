"""Keys and values that outlive their row, of every kind of layer.

Read `kinds.py` first: how each kind of layer keeps what it has read; a new kind belongs there. Then `prefix_cache.py`:
what sequences leave (`entries.py`), found again by their blocks (`block_keys.py`), short prompts by what their blocks
leave over (`tails.py`), and by snapshots where layers cannot be cut (`snapshots.py`: at which positions). `slabs.py`
copies several rows at once. `sharing.py` gives KV away and takes it in, as bytes that are checked when they are read
(`parcels.py`); `disk/` keeps in files what memory has no room for.

`layout.py` says which caches a model's rows get; `quantised.py` holds those of 8 and 4 bits, `ragged.py` those of a
batch whose rows end at different positions, after drafts. `cuda/` reads both, plain and quantised, in decode steps.
"""
