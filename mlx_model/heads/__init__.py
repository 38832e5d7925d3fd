"""Heads: small networks on the last hidden state of a text, each row with those of its own adapter version.

`head.py` computes one; `classifier.py` reads that of a Hugging Face classifier. Which rows want one and when their text
is read: worker/engine/batch/prefill_lane.py; where those of a version come from: mlx_model/lora/reader.py.
"""
