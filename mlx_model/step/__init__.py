"""The decode step of some families, of few operations.

`decode_step.py` is its forward, `layer.py` what a layer does in it, `product.py` a linear, `adapting.py` adapters.
Of other families, `split_step.py` is the forward and `split_layer.py` a layer of mlx-lm's, compiled.
"""
