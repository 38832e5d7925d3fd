"""The trainer: rollouts become groups, groups a train step, a train step an adapter version that workers load.

    __main__.py   `mlx_parallm_train`, a process of its own; `hosted.py` is the same run inside a worker
    runs/         the life of a run, and its kinds: rl, sft and dpo, distill, reward, ppo
    learners/     what learns, and where it computes: this thread, a worker, ranks, the service, other processes
    learn/        the mathematics: losses, advantages, log-probabilities, one AdamW, the gate's checks
    rollouts/     tasks, curricula, episodes, environments, their scoring; live traffic
    versions/     publish, checkpoints, the run's folder
    ring/         the way to the ring: by its Redis, or over HTTP
    night/        night school: a run a night from users' sessions (`mlx_parallm_serve --learn-when`)
    service/      many learners at once over one base, as others ask for it (`mlx_parallm_learners`)

Read `runs/loop.py` first: the whole of `--mode rl`, from prompts to served versions. `settings.py` has the flags,
`sharing.py` those of runs that learn together, `state.py` the progress that a checkpoint saves, `loggers/` the boards
that others draw of a run. `recipes/` holds settings, `tiny/` and `tiny_vision/` make our own small models. `merging.py`
is a program of its own: an adapter becomes part of its base's weights.
"""
