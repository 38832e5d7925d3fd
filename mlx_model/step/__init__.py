"""The decode step of some families, of few operations.

`decode_step.py` is its forward, `layer.py` what a layer does in it, `product.py` a linear, `adapting.py` adapters.
"""
