"""Turns by key: keys share the places, and the jobs of a key share its part.

Each turn costs the time that it took. The next one goes to the key that has had the least, and in it to the job that
has had the least. A key that comes anew, or comes again after a rest, begins where those that have waited stand: time
cannot be saved up, and having been alone costs nothing.

Used for rewards and own code (a job is a job), image files, and the learners of a service (a job is a learner).
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

MOST_KNOWN = 64  # keys, or jobs of a key, that are remembered while they rest


@dataclass
class _Account:
    """The time that a key, or a job of it, has used, and who waits."""

    spent_s: float = 0.0
    running: list[float] = field(default_factory=list)  # when each began
    clock_s: float = 0.0  # what the last one served had had when its turn came
    jobs: "dict[str, _Account]" = field(default_factory=dict)
    waiting: "deque[asyncio.Future[None]]" = field(default_factory=deque)

    def had_s(self, now: float) -> float:
        return self.spent_s + sum(now - began for began in self.running)

    @property
    def wants(self) -> bool:
        return bool(self.waiting) or any(job.wants for job in self.jobs.values())

    @property
    def idle(self) -> bool:
        return not self.running and not self.wants


class FairTurns:
    """At most `room` turns at a time, shared by key."""

    def __init__(self, room: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._free = room
        self._clock = clock
        self._all = _Account()

    @contextlib.asynccontextmanager
    async def turn(self, key: str, job: str = "") -> AsyncIterator[None]:
        """Wait for a turn and have it until the end of the block."""
        mine = self._known(self._all, key)
        ours = self._known(mine, job)
        await self._wait(ours)
        began = self._clock()
        for account in (mine, ours):
            account.running.append(began)
        try:
            yield
        finally:
            took = self._clock() - began
            for account in (mine, ours):
                account.running.remove(began)
                account.spent_s += took
            self._free += 1
            self._serve()

    def _known(self, parent: _Account, name: str) -> _Account:
        account = parent.jobs.setdefault(name, _Account())
        if account.idle:
            account.spent_s = max(account.spent_s, parent.clock_s)
        if len(parent.jobs) > MOST_KNOWN:
            parent.jobs = {other: each for other, each in parent.jobs.items() if each is account or not each.idle}
        return account

    async def _wait(self, account: _Account) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        account.waiting.append(turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn in account.waiting:
                account.waiting.remove(turn)
            elif not turn.cancelled():  # its turn came as it left
                self._free += 1
                self._serve()
            raise

    def _serve(self) -> None:
        """Give free turns to the askers that have used the least time."""
        while self._free and self._all.wants:
            now = self._clock()
            account = self._all
            while account.jobs:
                wanting = [each for each in account.jobs.values() if each.wants]
                least = min(wanting, key=lambda each: each.had_s(now))
                account.clock_s = max(account.clock_s, least.spent_s)
                account = least
            turn = account.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._free -= 1
