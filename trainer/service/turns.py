"""Whose microbatch is computed next: that of the tenant which has had the least time, of its learners the same.

A learner that comes anew, or back, neither waits for what it missed nor gets it back (shared/turns.py).
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from shared.turns import FairTurns
from trainer.learn.compute import ComputeHost, Work, at_once
from trainer.learn.machine_care import MachineCare

T = TypeVar("T")
_MORE = object()


class Turns:
    """Fair shares of a thread that computes."""

    def __init__(self, host: ComputeHost, care: MachineCare, stop: asyncio.Event) -> None:
        """`care` holds units back, where the machine or the user wants it, until `stop` is set."""
        self._host, self._care, self._stop = host, care, stop
        self._turns = FairTurns(1)
        self.alone = asyncio.Lock()  # for requests that may have ended a service

    async def run(self, learner: str, start: Callable[[], Work[T]], owner: str = "") -> T:
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

        while True:
            async with self._turns.turn(owner, learner), self._care.step(self._stop):
                done = await asyncio.shield(asyncio.ensure_future(self._host.run(at_once(advance))))
            if isinstance(done, tuple):
                value: T = done[0]
                return value
