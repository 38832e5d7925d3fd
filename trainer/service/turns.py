"""Whose microbatch is computed next: that of the learner which has had the least time.

Pure book-keeping around one lock. A learner that comes anew, or back, starts with what the one behind all others has
had, so that it neither waits for what it missed nor gets it back.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from trainer.learn.compute import ComputeHost, Work, at_once

T = TypeVar("T")
_MORE = object()


class Turns:
    """Fair shares of a thread that computes."""

    def __init__(self, host: ComputeHost) -> None:
        self._host = host
        self._had: dict[str, float] = {}  # seconds that each learner has had
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._busy = False
        self.alone = asyncio.Lock()  # for requests that may have ended a service

    async def run(self, learner: str, start: Callable[[], Work[T]]) -> T:
        """Work of a learner, in turns with that of others; it has one piece of work at a time."""
        work: Work[T] | None = None

        def advance() -> T | object:
            nonlocal work
            work = start() if work is None else work
            try:
                next(work)
            except StopIteration as end:
                value: T = end.value
                return (value,)
            return _MORE

        others = [self._had[other] for other in self._waiting]
        self._had[learner] = max(self._had.get(learner, 0.0), min(others, default=0.0))
        while True:
            await self._turn(learner)
            began = time.perf_counter()
            try:
                done = await asyncio.shield(asyncio.ensure_future(self._host.run(at_once(advance))))
            finally:
                self._had[learner] += time.perf_counter() - began
                self._next()
            if isinstance(done, tuple):
                value: T = done[0]
                return value

    def forget(self, learner: str) -> None:
        """A learner has gone."""
        self._had.pop(learner, None)

    async def _turn(self, learner: str) -> None:
        if not self._busy:
            self._busy = True
            return
        turn = self._waiting[learner] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.pop(learner, None)
            if turn.done() and not turn.cancelled():  # it came at the same moment
                self._next()
            raise

    def _next(self) -> None:
        while self._waiting:
            learner = min(self._waiting, key=lambda name: self._had.get(name, 0.0))
            turn = self._waiting.pop(learner)
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False
