"""`mlx_parallm_train --mode sft` and `--mode dpo`: a policy learns from answers that are shown, or preferred.

`run.py` first: what of a run on a data set (`datasets/`) is theirs. `examples.py` reads the data and says which tokens
count, `feedback.py` takes preferences from the ring, `losses.py` are the losses, `learner.py` computes them (in the MLX
thread), `led.py` on several ranks.
"""
