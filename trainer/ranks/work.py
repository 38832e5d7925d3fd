"""Work that all ranks of a group do together, as rank 0 asks for it. In the thread of rank 0 that computes."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import mlx.core as mx
import msgspec
from mlx_lm.generate import generation_stream

from trainer.learn.compute import Others, Work

T = TypeVar("T")


class Alike(Protocol):
    """A learner that is the same on all ranks."""

    def digest(self) -> int:
        """A sum over its parameters' bits."""


class Together:
    """Rank 0's way to have something done everywhere: `learner` says afterwards what came of it."""

    def __init__(self, others: Others, learner: Alike) -> None:
        self._others, self._learner = others, learner
        self._busy = False  # in a unit

    def work(self, ask: msgspec.Struct, start: Callable[[], Work[T]]) -> Work[T]:
        """Let the others do what `start` does here, unit by unit; whoever gives it up does so on all ranks.

        What is asked within a unit is a part of it, on all ranks. An error that all ranks have had is raised; one that
        only some have ends the group (worker/group/lead.py).
        """
        if self._busy:
            return (yield from start())
        body = msgspec.msgpack.encode(ask)
        work: Work[T] | None = None
        try:
            while True:
                self._others.unit(body)
                body = b""
                self._busy = True
                try:
                    with mx.stream(generation_stream):  # one stream for all sums of a group
                        work = work or start()
                        next(work)
                except StopIteration as end:
                    self._others.united(told(self._learner))
                    value: T = end.value
                    return value
                except Exception:
                    self._others.failed()
                    raise
                finally:
                    self._busy = False
                self._others.united(b"")
                yield
        finally:
            if work is not None:
                work.close()

    def now(self, ask: msgspec.Struct, function: Callable[[], T]) -> T:
        """The same of something short."""

        def start() -> Work[T]:
            return function()
            yield

        work = self.work(ask, start)
        try:
            next(work)
        except StopIteration as end:
            value: T = end.value
            return value
        raise AssertionError("it has one unit")


def told(learner: Alike) -> bytes:
    """What came of a piece of work, to be compared between ranks."""
    with mx.stream(generation_stream):
        return str(learner.digest()).encode()
