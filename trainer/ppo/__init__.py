"""`mlx_parallm_train --mode ppo`: a policy that is a small network learns to act in an environment of ours.

`run.py` first: collect, learn, gate, publish, evaluate. `cart_pole.py` is the environment, `acting.py` plays it over
the ring, `sequences.py` cuts what was played. `network.py` computes a network with gradients, `losses.py` are the
losses, `learner.py` updates weights (in the MLX thread).
"""
