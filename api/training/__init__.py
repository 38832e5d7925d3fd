"""Training over HTTP: the trainer is another process, and is reached through Redis.

`routes.py`: post trajectories, look at a run, save a checkpoint; `body.py` checks what is posted. `remote_trainers.py`
is the other direction: what a trainer that knows the api alone (`--over-http`) reports and asks.
"""
