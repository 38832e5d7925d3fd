"""Images of a run's prompts, for models that see.

pictures.py   from the parts of messages to what a sequence names, and to the tiles that a tower sees
sight.py      from tiles to vectors: the tower is the worker's, frozen
"""
