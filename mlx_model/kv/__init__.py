"""Keys and values of every kind of layer, as a forward reads and writes them.

Read `kinds.py` first: how each kind of layer keeps what it has read; a new kind belongs there. `layout.py` says which
caches a model's rows get; `quantised.py` holds those of 8 and 4 bits, `ragged.py` those of a batch whose rows end at
different positions, after drafts, and `shared.py` those of rows that begin alike; `padded.py` is attention with
gradients on CUDA. `apart.py` has rows that do not depend on one another, and `places.py` the forwards that read them.
`cuda/` reads plain and quantised KV in decode steps. What outlives its row is in worker/engine/prefixes/.
"""
