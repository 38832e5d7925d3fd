"""The mathematics of a train step, and the arrays that it needs. The trainer's MLX work is here and in the learners.

Read in this order: `optimize.py` (one train step, also in parts; `steps.py` says what one is), `adam.py` (one update,
of all learners), `losses.py` (the losses by name; `ppo_losses.py`, `divergence.py`), `logprobs.py`
(log-probabilities with gradients), `prompt_kv.py` (keys and values of prompts there) and `drawing.py` (the sampler's
filters), `policy.py` (LoRA layers over the base's arrays, and heads), `ppo_network.py` (a network with gradients).

Before that, in plain numpy: `batches.py` (groups to advantages and padded arrays), `advantages.py` (those of PPO).
Besides: `compute.py` (the thread that computes), `gate.py` (bounds and checks of a version), `measures.py` (distances
between policies), `learn_when.py` (when a run may train), `machine_care.py` (battery and memory between two train
steps), `microbatch_size.py`, `packing.py` (a learner's state as bytes), `options.py` (plain data, without MLX),
`peers.py` (several processes that compute one train step), `picture_places.py` (images in the rows of a forward),
`routes.py` (the experts that a forward replays).
"""
