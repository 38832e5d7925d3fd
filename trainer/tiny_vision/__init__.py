"""Makes `models/tiny-vision`, a small model of ours that sees: `python -m trainer.tiny_vision.train`.

data.py        pictures of digits and shapes, and questions about them, drawn from one seed
train.py       the model, its training and its folder
counting.py    a data set of pictures with something left to learn
"""
