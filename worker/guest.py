"""A guest shares this worker's engine thread, such as the trainer; plugged in by name, worker knows no more of it.

`--guest package.module:Class` names a class that is called with the worker's settings before the model is loaded
(SetupError when it cannot work with them) and lives from `start` to `stop`. What it may run in the engine's thread, and
for how long, is the engine's business (worker/engine/between_steps.py).

Invariant: whatever becomes of a guest, the worker goes on serving.
"""

import asyncio
import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import structlog

from mlx_model.loader import LoadedModel
from ranks.following import Learning
from ranks.lead import GroupLead
from shared.errors import SetupError
from shared.process.worker_settings import WorkerSettings
from worker.engine.thread import EngineThread

log = structlog.get_logger()

STOP_S = 8.0  # for what is under way


@dataclass(frozen=True)
class Workplace:
    """Resources that a worker lends to its guest."""

    engine: EngineThread  # of which a guest uses `run_between_steps`
    loaded: LoadedModel  # its model belongs to the engine's thread
    others: GroupLead | None = None  # the other ranks of a group, which a guest lets do each unit that it does


class Guest(Protocol):
    """Called on the worker's event loop or in a thread; none of it may block for long but `stop`.

    One that has a `rank(loaded)` may be a guest of several ranks: that makes what the other ranks do in its place.
    `--dry-run` prints what a `resolved()` returns: the guest's own settings, as YAML.
    """

    def start(self, place: Workplace, ended: Callable[[bool], None]) -> None:
        """Begin; `ended` is called once, from any thread: True when all is done, False when it gave up."""

    def stop(self, timeout_s: float) -> None:
        """End what is under way in order, or after `timeout_s` without."""


def invited(settings: WorkerSettings) -> Guest | None:
    """The guest that the settings name."""
    kind = _kind(settings)
    return None if kind is None else cast(Guest, kind(settings))


def own_settings(guest: Guest | None) -> str:
    """The guest's own settings, as a further document of YAML; "" where it has none."""
    resolved = getattr(guest, "resolved", None)
    return "" if resolved is None else f"---\n{resolved()}"


def rank_of_guest(settings: WorkerSettings) -> Callable[[LoadedModel], Learning] | None:
    """Factory of the guest's part on the other ranks of a group; None without a guest."""
    kind = _kind(settings)
    if kind is None:
        return None
    if not hasattr(kind, "rank"):
        raise SetupError(f"--guest {settings.guest} cannot be had by a worker of several ranks: it knows of one alone")
    return cast(Callable[[LoadedModel], Learning], kind.rank)


def _kind(settings: WorkerSettings) -> Any | None:
    if not settings.guest:
        return None
    module, _, name = settings.guest.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(f"--guest {settings.guest}: {error}; it names a class as package.module:Class") from error


class Lodging:
    """The stay of a guest with one worker, if there is one."""

    def __init__(self, guest: Guest | None, end_with_guest: bool) -> None:
        self._guest = guest
        self._end_with_guest = end_with_guest
        self.exit_code = 0  # of the worker, when nothing worse has happened

    def open(self, place: Workplace, end_worker: asyncio.Event) -> None:
        """Let the guest begin; called on the worker's loop."""
        loop = asyncio.get_running_loop()

        def left(done: bool) -> None:
            log.info("worker.guest_left", done=done)
            if self._end_with_guest:
                self.exit_code = 0 if done else 2
                end_worker.set()

        def ended(done: bool) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: we have ended, too
                loop.call_soon_threadsafe(left, done)

        if self._guest is not None:
            self._guest.start(place, ended)

    async def close(self, *, hopeless: bool) -> None:
        """Stop the guest; at once when the engine is of no use any more."""
        if self._guest is not None:
            await asyncio.to_thread(self._guest.stop, 0.0 if hopeless else STOP_S)
