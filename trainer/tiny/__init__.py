"""The tiny model that demo and tests run on.

`data.py` (its corpus), `tokenizer.py`, `model.py` (its shape), `train.py` (the script), `evaluate.py`.
"""
