"""`mlx_parallm_train --mode distill`: a policy learns to say what another model or version of the ring would.

`run.py` first: what of a run on a data set (`datasets/`) is its own; the rest is that of `tuning/`. `teacher.py` asks
the ring for the teacher's scores, `loss.py` is the loss, `learner.py` computes it (in the MLX thread), `led.py` on
several ranks.
"""
