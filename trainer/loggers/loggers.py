"""The packages that a run logs to, from its start to its end."""

import asyncio
import contextlib
import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import structlog

from trainer.loggers.sender import Sender
from trainer.loggers.tracked_run import Ending, Plain, Samples, TrackedRun, Tracker, by_name

log = structlog.get_logger()

# Seconds that the end of a run waits for all packages: one that is stopped has a supervisor that waits for it.
FLUSH_S: dict[Ending, float] = {"finished": 60.0, "stopped": 15.0, "failed": 15.0}
HURRIED_S = 1.0  # the same, when the run is ended at once


class Loggers:
    """All senders of one run. Leaving the context ends them, and waits for their queues."""

    def __init__(
        self,
        names: Sequence[str] = (),
        *,
        project: str = "",
        run_name: str = "",
        config: Mapping[str, Plain | list[Plain]] | None = None,
        with_samples: bool = False,
    ) -> None:
        self._with_samples = with_samples
        self.config = config or {}
        self._names, self._project, self._run_name = names, project, run_name
        self._senders: list[Sender] = []
        self._left = 0
        self._done = asyncio.Event()
        self.ending: Ending = "stopped"

    def begin(self, folder: Path, *, anew: bool) -> None:
        """Open the run everywhere, in threads; `anew`: not the one that this folder was logged to before."""
        loop = asyncio.get_running_loop()

        def ended() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: no task waits any more
                loop.call_soon_threadsafe(self._one_ended)

        self._left = len(self._names)
        for name in self._names:
            id_file = folder / "loggers" / f"{name}.id"
            if anew:
                id_file.unlink(missing_ok=True)
            run = TrackedRun(self._project, self._run_name, self.config, id_file)
            self._senders.append(Sender(name, partial(_open, name), run, ended))

    def write(self, train_step: int, values: Mapping[str, Any], samples: Samples = ()) -> None:
        """Queue a line of metrics.jsonl, and the samples where the settings allow it; returns at once."""
        if self._senders:
            point = train_step, dict(by_name(values)), samples if self._with_samples else ()
            for sender in self._senders:
                sender.put(point)

    def _one_ended(self) -> None:
        self._left -= 1
        if not self._left:
            self._done.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        at_once = isinstance(error, asyncio.CancelledError)
        if error is not None:
            self.ending = "stopped" if at_once else "failed"
        for sender in self._senders:
            sender.end(self.ending)
        if not self._left:
            return
        try:
            async with asyncio.timeout(HURRIED_S if at_once else FLUSH_S[self.ending]):
                await self._done.wait()
        except TimeoutError:
            for sender in self._senders:
                log.warning("train.logger_late", logger=sender.name, train_steps_lost=sender.waiting)


def _open(name: str, run: TrackedRun) -> Tracker:
    """The run in the package of this name, which is imported in the sender's thread: that alone may take seconds."""
    opened: Tracker = importlib.import_module(f"trainer.loggers.{name}").open_run(run)
    return opened
