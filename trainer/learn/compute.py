"""Where the trainer's MLX work runs. All of it runs in one thread, because MLX arrays and its RNG belong to a thread.

Work is a generator: it yields when everything is evaluated and something else may run. *Separate*: `ThreadHost`, a
thread of its own. *Hosted*: the worker's engine thread takes the same generators and advances them between decode
steps, by share (worker.engine owns that side; it only needs this protocol).
"""

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import mlx.core as mx

from mlx_model.loader import LoadedModel
from shared.ranks import RankStatus
from trainer.learn.learn_when import Permission

T = TypeVar("T")
Work = Generator[None, None, T]


class ComputeHost(Protocol):
    """Runs MLX work in its thread."""

    @property
    def others(self) -> "Others | None":
        """The other ranks' threads, which must do the same work where ranks divide the model; None: there is one
        rank.
        """

    permission: Permission | None  # of a run that may not always train

    async def run(self, start: Callable[[], Work[T]]) -> T:
        """Call `start` in the thread, advance what it gives to its end, and return its value or raise its error."""


class Others(Protocol):
    """The other ranks of a group, as the thread of rank 0 sees them (ranks/lead.py)."""

    def unit(self, ask: bytes) -> None:
        """Order a unit of work: the first one of the call `ask`, or with b"" the next one of the present call."""

    def united(self, told: bytes) -> None:
        """Report the result of a unit of work, which must be the same on every rank."""

    def failed(self) -> None:
        """It has failed here: returns when it has failed everywhere; ServiceUnavailableError when it has not."""

    def ranks(self) -> tuple[RankStatus, ...]:
        """All of them, with rank 0; for a heartbeat, on the event loop."""


class SharedEngine(Protocol):
    """Interface of a worker's engine thread (worker/engine/between_steps.py)."""

    def run_between_steps(self, start: Callable[[], Work[T]], *, when_idle: bool = False) -> Future[T]:
        """Run work there by its share, or only while no row is there; cancelling the future ends it."""


class LendingWorker(Protocol):
    """Resources of a worker that its guest uses (worker/guest.py:Workplace)."""

    @property
    def engine(self) -> SharedEngine:
        """The thread in which all MLX work runs."""

    @property
    def loaded(self) -> LoadedModel: ...

    @property
    def others(self) -> Others | None:
        """The other ranks of the worker's group; None for a worker of one process."""


class EngineHost:
    """Runs in a worker's engine thread, between decode steps."""

    def __init__(self, engine: SharedEngine, others: Others | None = None) -> None:
        self._engine, self.others = engine, others
        self.permission: Permission | None = None

    async def run(self, start: Callable[[], Work[T]]) -> T:
        """Run to the end, with decode steps in between."""
        when_idle = self.permission is not None and self.permission.when.idle
        return await asyncio.wrap_future(self._engine.run_between_steps(start, when_idle=when_idle))


class ThreadHost:
    """A thread of our own; nothing runs between the parts of a piece of work."""

    def __init__(self, others: Others | None = None) -> None:
        self.others = others
        self.permission: Permission | None = None
        self._abandoned = False
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")

    async def run(self, start: Callable[[], Work[T]]) -> T:
        """Run to the end, without a pause where the run may always train."""
        between = None if self.permission is None else self.permission.hold
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: finished(start(), between))

    def abandon(self) -> None:
        """Do not wait for the thread any more: it may hang in a sum that no other rank takes part in."""
        self._abandoned = True

    async def __aenter__(self) -> "ThreadHost":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._abandoned:
            return
        # Without this, MLX's streams may abort the process at exit.
        await asyncio.get_running_loop().run_in_executor(self._executor, _release)
        self._executor.shutdown(wait=True)


def at_once(function: Callable[[], T]) -> Callable[[], Work[T]]:
    """A short function as work in one part."""

    def start() -> Work[T]:
        return function()
        yield

    return start


def finished(work: Work[T], between: Callable[[], None] | None = None) -> T:
    """The value of work that is done in one go, but for what is called between two units."""
    while True:
        try:
            next(work)
            if between is not None:
                between()
        except StopIteration as end:
            value: T = end.value
            return value


def _release() -> None:
    mx.synchronize()
    mx.clear_streams()
