"""`mlx_parallm_train --mode ppo`: a policy that is a small network learns to act in an environment.

`run.py` first: collect, learn, gate, publish, evaluate. `environments.py` has the environments, of which `cart_pole.py`
is ours, `acting.py` plays them over the ring, `sequences.py` cuts what was played. `network.py` computes a network with
gradients, `losses.py` are the losses, `learner.py` updates weights (in the MLX thread).
"""
