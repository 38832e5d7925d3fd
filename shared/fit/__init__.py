"""The fit of models into this machine's memory, decided before a model is loaded. Pure, but for reading files; no MLX.

Read in this order: `weights.py` (sizes of tensors, from the headers of safetensors files), `needs.py` (what a model
needs besides), `reservations.py` (what other processes of ours on this machine have promised themselves), `plan.py`
(the decision, and what would fit where it does not), `model_fit.py` (one model beside what runs already). The worker,
the trainer and the learners' service all ask here.
"""
