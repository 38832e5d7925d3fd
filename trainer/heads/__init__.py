"""`mlx_parallm_train --mode reward`: a head, with a LoRA or alone, learns from what people prefer.

`run.py` first: from settings to published versions. `examples.py` reads the data, `learner.py` computes (in the MLX
thread), `network.py` is the head as it learns.
"""
