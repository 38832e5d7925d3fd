"""Tinker's protocol under /api/v1: its SDK trains learners of the training service, and samples through the queue.

Read in this order: `sessions.py` (what a client begins with), `training.py` (learners and their requests),
`sampling.py` (samplers and samples), `futures.py` (the results of both, by long polls), `checkpoints.py` (saves and
training runs), `downloads.py` (saves as files, made by `archive.py`).
`bodies.py` has the JSON bodies, `protobuf.py` the others, whose items `wire.py` counts; `passes.py` reads those of
passes, which may be long. `numbered.py` places what is refused. `prompts.py` knows prompts with images,
`prompt_token_query.py` other tokens in the places of a prompt's own. `names.py` says how things are called, and whose
they are.

The specification is the SDK itself (PyPI: tinker), of which 0.24.1 and 0.38.0 are run against this.
"""
