"""The train step: advantages, log-probabilities, loss, one AdamW update. The trainer's MLX work is here.

Read in this order: `learner.py` (what the loop calls, in the MLX thread that `compute.py` gives it), `optimize.py` (one
train step, also in parts; `steps.py` says what one is), `adam.py` (one update, also the training service's),
`losses.py` (the losses by name), `logprobs.py` (log-probabilities with gradients) and `drawing.py` (the sampler's
filters), `policy.py` (LoRA layers over the base's arrays, and a value head: `head_net.py`).

Before that, in plain numpy: `batches.py` (groups to advantages and padded arrays), `advantages.py` (those of PPO).
Besides: `measures.py` (distances between policies), `microbatch_size.py` (how large a microbatch may be), `packing.py`
(a learner's state as bytes), `options.py` (plain data, without MLX), `peers/` (several that compute one train step).
"""
