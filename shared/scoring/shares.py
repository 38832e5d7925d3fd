"""Whose turn it is: keys share what there is, and the jobs of a key share its part.

Each turn costs the time that it took. The next one goes to the key that has had the least, and in it to the job that
has had the least. Who comes anew, or comes again after a rest, begins where those who have waited stand: nobody saves
time up, and nobody is made to pay for having been alone.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

GIVE_UP_AFTER = 16  # samples in a row that ran out of time
ALIKE = 2  # from which on a job is taken for one of those with the same reward
MOST_KNOWN = 64  # keys, or jobs of a key, that are remembered while they rest


@dataclass(eq=False)
class Lateness:
    """How many samples in a row have run out of time."""

    in_a_row: int = 0

    def saw(self, late: bool) -> None:
        """A sample was scored, or ran out of time."""
        self.in_a_row = self.in_a_row + 1 if late else 0


@dataclass
class Share:
    """Who asks for scores, and how many samples have run out of time."""

    key: str = ""  # name of the API key; "" where nobody needs one
    job: str = ""
    mine: Lateness = field(default_factory=Lateness)
    of_all: Lateness = field(default_factory=Lateness)  # of all the key's jobs with the same reward

    def saw(self, late: bool) -> None:
        """A sample was scored, or ran out of time."""
        self.mine.saw(late)
        self.of_all.saw(late)

    @property
    def given_up(self) -> bool:
        """Whether so many have run out of time that the next ones will."""
        return self.late >= GIVE_UP_AFTER

    @property
    def late(self) -> int:
        """Samples in a row that ran out of time, here or, when it looks alike here, in all of the key's jobs."""
        return max(self.mine.in_a_row, self.of_all.in_a_row) if self.mine.in_a_row >= ALIKE else self.mine.in_a_row

    def try_again(self) -> None:
        """Allow one more sample, which may show that the reward was not at fault."""
        for lateness in (self.mine, self.of_all):
            lateness.in_a_row = min(lateness.in_a_row, GIVE_UP_AFTER - 1)


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
    """At most `room` turns at a time."""

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
        """Give free turns to those who have used the least time."""
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
