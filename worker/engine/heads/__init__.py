"""Heads: small networks on the last hidden state of a text, each row with those of its own adapter version.

`head.py` computes one. Which rows want one and when its text is read: `batch/prefill_lane.py`; where those of a
version come from: `lora/reader.py`.
"""
