"""Images: from the tiles of an image to the vectors that a prompt is fed with in their place.

Read in this order: `families.py` (which models see, how they are loaded: the tower by mlx-vlm, the language side by
mlx-lm), `language.py` (that side), `qwen.py` and `gemma.py` (towers that go in pieces of layers), `features.py` (an
image's vectors, and where they stand in a prompt), `positions.py` (where ids stand if positions have three axes).
Which images are encoded next, and what is kept: worker/engine/gallery.py.
"""
