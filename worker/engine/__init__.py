"""The continuous batch on MLX: one thread owns the model, plain data goes in and comes out.

Read in this order: `messages.py` (what goes in and out), `thread.py` (the thread and its loop), `engine.py` (one turn),
`scheduler.py` (which prompt is fed next, and how much of it; pure), `reserved.py` (which rows there is KV for; pure).
Then the rooms: `batch/` (the rows that decode together), `prefixes/` (keys and values that are kept), `speculation/`
(several tokens of a row in one step); the model itself is in mlx_model/. `adapter_slots.py` loads versions of adapters
between decode steps, `slot_table.py` says which is in which slot (pure); `gallery.py` says which images are encoded
next, a tile or a piece at a time between decode steps, and what is kept of them, `album.py` what of it in files.
`orders.py` is what others have the engine do between two turns, `build.py` what it begins with, both the same on every
rank of a group; `turns.py` is what a turn takes from the world, so that all ranks do the same in it. `between_steps.py`
lets others, such as a trainer, compute between two decode steps, `warm_up.py` measures and compiles while no row is
there.
"""
