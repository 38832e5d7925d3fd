"""The continuous batch on MLX: one thread owns the model, plain data goes in and comes out.

Read in this order: `messages.py` (what goes in and out), `thread.py` (the thread and its loop), `engine.py` (one turn),
`scheduler.py` (which prompt is fed next, and how much of it; pure). Then the rooms: `batch/` (the rows that decode
together), `kv/` (keys and values that are kept), `lora/` (adapters), `heads/` (small networks on hidden states),
`networks/` (those that are no language models),
`sampling/` (drawing a token), `model/` (loading, and what differs between models and back ends), `speculation/`
(several tokens of a row in one step), `vision/` (images in prompts).
`orders.py` is what others have the engine do between two turns, `build.py` what it begins with, both the same on
every rank of a group; `ranks/` is what keeps ranks together within a turn.
`between_steps.py` lets others, such as a trainer, compute between two decode steps, `warm_up.py` measures and compiles
while no row is there. `cuda/`: what our kernels share.
"""
