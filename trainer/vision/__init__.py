"""Images of a run's prompts, for models that see.

pictures.py   from the parts of messages to what a sequence names, and to the tiles that a tower sees
shelf.py      the images of a data set, for two threads that want them
sight.py      from tiles to vectors: the tower is the worker's, frozen
places.py     where the vectors stand in the rows of a forward pass, and at which positions
"""
