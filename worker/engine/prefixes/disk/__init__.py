"""The prefix cache's second tier: KV in files, which outlive the worker and are shared by the workers of a machine.

Read `tiered_cache.py` first: what is looked for on disk, and when a row waits for it. `tier.py` moves KV between memory
and disk, a little between two steps. In threads: `writing.py` and `reading.py`. `index.py` knows what is there, and
`folder.py` keeps the files within their bound. What is in a file: `prefixes/parcels.py`.
"""
