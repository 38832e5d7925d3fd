"""The fit of models into this machine's memory, decided before a model is loaded. Pure, but for reading files; no MLX.

Read in this order: `weights.py` (sizes of tensors, from the headers of safetensors files), `needs.py` (what a model
needs besides), `reservations.py` (what other processes of ours on this machine have promised themselves), `plan.py`
(the decision, and how what is left is divided), `model_fit.py` (one model, and what would fit where it does not). The
worker, the trainer and the learners' service all ask here.
"""
