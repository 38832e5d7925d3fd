"""The figures of a run for other tools: `--tensorboard DIR`, `--logger wandb|mlflow|trackio`.

    choice.py        the names that `--logger` takes, and whether their packages are installed
    tracked_run.py   the run, its figures and samples as such a package gets them, and the protocol of a package
    sender.py        a queue and a thread for one package, which never delays a train step
    loggers.py       all senders of a run, from its start to its end
    wandb.py, mlflow.py, trackio.py   the packages, through their own Python APIs
    tensorboard.py   TensorBoard's files, which need no service and no thread

Read `sender.py` first: its invariants are those of the room.
"""
