"""The trainer: rollouts become groups, groups a train step, a train step an adapter version that workers load.

    __main__.py   `mlx_parallm_train`, a process of its own; `hosted.py` is the same run inside a worker
    kinds.py      which kind of run the settings ask for
    run.py        from settings to the parts of a run
    parts.py      those parts: a thread that computes, a model to train, a ring, tasks
    loop.py       the whole of training: collect, train, gate, publish, checkpoint
    sources.py    the sources of a run, as its settings name them
    inbox.py      what to train on next: own prompts, live traffic, or what a user has posted
    gate.py       the checks that a version must pass; pure
    state.py      the progress that a checkpoint saves

Read `loop.py` first. Then `rollouts/` (samples and their rewards), `curricula/` (which tasks), `learn/` (the train
step, the one room that computes with MLX), `versions/` (gate, publish, checkpoints) and `ring/` (how all of it
reaches the ring). `settings.py` has the flags, `orders.py` what users ask, `metrics.py` what a run reports,
`loggers/` the boards that others draw of it, `stopping.py` signals, `warm_up.py` the train steps before a hosted
trainer is ready. `recipes/` holds settings, `tiny/` and `tiny_vision/` make our own small models.
`datasets/` are runs that learn from a data set in place of rollouts: `heads/` a head that learns from preferences
(`--mode reward`), `tuning/` a policy that learns from examples or preferences (`--mode sft`, `dpo`),
`distilling/` one that learns from a teacher's scores (`--mode distill`).
`ppo/` teaches a small network to act in an environment (`--mode ppo`).
`learners/` is a run's learner in a thread of its own or of the training service.
`shares/` is a run's learner whose train steps several processes compute (`--learner shared`, `--join-run`).
`ranks/` is a run's learner on a model that ranks divide, `group/` a trainer of several ranks (`--num-local-ranks`).
`rounds/` are runs that average their weights from time to time (`--federation`); `sharing.py` has the settings of both.
`agents/` are several runs in one process, over one base (`--agents`).
`service/` trains many learners at once over one base, as others ask it to (`mlx_parallm_learners`).
`merging/` is a program of its own: an adapter becomes part of its base's weights.
"""
