"""The figures of a run for other people's boards: `--tensorboard DIR`, `--logger wandb|mlflow|trackio`.

    figures.py       what is written of a train step, and under which names
    choice.py        the names that `--logger` takes, and whether their packages are installed
    tracked_run.py   what such a package is told of a run, and what a way to it has to do
    sender.py        a queue and a thread for one package, which never delays a train step
    loggers.py       all senders of a run, from its start to its end
    wandb.py, mlflow.py, trackio.py   the packages, through their own Python APIs
    tensorboard.py   TensorBoard's files, which need no service and no thread

Read `sender.py` first: its invariants are those of the room.
"""
