"""Trackio: `--logger trackio`: files on this machine (`TRACKIO_DIR`), or by its variables a Space or a server."""

from collections.abc import Mapping

import trackio

from trainer.loggers.tracked_run import COLUMNS, Ending, Samples, TrackedRun, rows


class TrackioRun:
    """A run of Trackio, identified by its name: the newest of that name continues after a restart."""

    def __init__(self, run: TrackedRun) -> None:
        resume = "allow" if run.known_id else "never"
        self._run = trackio.init(
            project=run.project, name=run.name, config=dict(run.config), resume=resume, embed=False
        )
        run.keep_id(self._run.name)

    def write(self, train_step: int, figures: Mapping[str, float], samples: Samples) -> None:
        """One entry, with the samples as a table."""
        table = {"samples": trackio.Table(columns=list(COLUMNS), data=rows(train_step, samples))} if samples else {}
        self._run.log({**figures, **table}, step=train_step)

    def end(self, ending: Ending) -> None:
        """Write how the run ended as its last entry, since Trackio has no states."""
        self._run.log({"ended": ending})
        self._run.finish()


open_run = TrackioRun
