"""Which task a new group of samples is of: evenly all of them, or those that the policy can learn from now.

Read in this order: `options.py` (what a curriculum may be told) and `settings.py` (by which flags), `pool.py` (what
each task has earned, and its weight), `difficulty.py` (how hard tasks are said to be), `places.py` (how hard the next
ones should be), `curriculum.py` (draws, and the books that a checkpoint keeps). All of it is plain data: no Redis, no
MLX, no event loop.
"""
