"""Training as a service: `mlx_parallm_learners` trains many adapters at once over one base.

Read in this order: `service.py` (which learners a process has, and for how long), `seat.py` (one of them: its requests
in order, its answers, its state), `learner.py` (what is computed, in the MLX thread) with `losses.py`, `run_learner.py`
(one of a run, `mlx_parallm_train --learner service`), `turns.py` (whose microbatch is next). `settings.py` has the
flags, `__main__.py` is the program, `hosted.py` the same in a worker. What is asked and answered stands in
`shared/learners.py` and, of a run, in `trainer/learners/calls.py`; how it is kept in
`shared/redis/training/learner_store.py`.
"""
