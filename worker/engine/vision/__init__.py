"""Images in the batch: from the tiles of an image to the vectors that a prompt is fed with in their place.

Read in this order: `families.py` (which models see, how they are loaded: the tower by mlx-vlm, the language side by
mlx-lm), `language.py` (that side), `qwen.py` (Qwen's tower, in pieces of layers), `features.py` (an image's vectors,
and where they stand in a prompt), `positions.py` (where ids stand if positions have three axes), `gallery.py` (which
images are encoded next, a tile or a piece at a time between decode steps, and what is kept of them).
"""
