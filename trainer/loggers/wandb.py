"""Weights & Biases: `--logger wandb`. `WANDB_MODE=offline` writes all into a folder, for `wandb sync` later."""

import secrets
from collections.abc import Mapping

import wandb

from trainer.loggers.tracked_run import COLUMNS, Ending, Samples, TrackedRun, rows

FINISH_S = 15  # W&B's own bound on what it still has to upload; it would hold up the process's exit
START_S = 60.0


class WandbRun:
    """A run of W&B. Its axis is `train_step`, so a step that is trained again after a kill stands at its own place."""

    def __init__(self, run: TrackedRun) -> None:
        run_id = run.known_id
        if not run_id:
            run_id = f"{run.name}-{secrets.token_hex(4)}"
            run.keep_id(run_id)  # first: a process that is killed in `init` begins no second run
        settings = wandb.Settings(
            console="off",  # what a process prints is not for others: it may quote prompts
            x_disable_meta=True,  # nor is its command line, which may hold a password
            disable_git=True,
            disable_code=True,
            save_code=False,
            silent=True,
            init_timeout=START_S,
            finish_timeout=FINISH_S,
        )
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run_id,
            resume="allow",
            reinit="create_new",
            config=dict(run.config),
            settings=settings,
        )
        self._run.define_metric("train_step")
        self._run.define_metric("*", step_metric="train_step")

    def write(self, train_step: int, figures: Mapping[str, float], samples: Samples) -> None:
        """One row of its history, with the samples as a table."""
        table = {"samples": wandb.Table(columns=list(COLUMNS), data=rows(train_step, samples))} if samples else {}
        self._run.log({"train_step": train_step, **figures, **table})

    def end(self, ending: Ending) -> None:
        """Finished or failed, as W&B has it; `ended` in its summary has our state."""
        self._run.summary["ended"] = ending
        self._run.finish(exit_code=int(ending == "failed"))


open_run = WandbRun
