"""`mlx_parallm_train --mode reward`: a head, with a LoRA or alone, learns from what people prefer, or from actions.

`run.py` first: what of a run on a data set (`datasets/`) is a head's. `examples.py` reads the data, `learner.py`
computes (in the MLX thread), `led.py` on several ranks, `network.py` is head and body in one tree.
"""
