"""Keys and values that outlive their row, to be found again by the beginning of a prompt.

Read `prefix_cache.py` first: what sequences leave (`entries.py`), found again by their blocks (`block_keys.py`), short
prompts by what their blocks leave over (`tails.py`), and by snapshots where layers cannot be cut (`snapshots.py`: at
which positions). `slabs.py` copies several rows at once. `sharing.py` gives KV away and takes it in, as bytes that are
checked when they are read (`parcels.py`); `disk/` keeps in files what memory has no room for. How each kind of layer
keeps what it has read is in mlx_model/kv/.
"""
