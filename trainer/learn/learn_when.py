"""When a run may train: the conditions of `--learn-when idle,plugged,23:00-07:00`, of which all must hold.

**idle** no interactive request waits or runs on the ring, and none has for QUIET_S · **plugged** the machine is not on
battery · **23:00-07:00** local time of the machine; of several windows one is enough, and a window may span midnight.

A run's work is held between two units (trainer/learn/compute.py): a microbatch that has begun ends. A run in a worker
leaves the first condition to the engine, which gives its units no time while a row is there.
"""

import asyncio
import datetime
import re
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

import structlog
from redis.exceptions import RedisError

from shared.errors import ParallmError
from shared.machine.power import Source, machine_power
from shared.process.loops import cancel

log = structlog.get_logger()

QUIET_S = 20.0  # an agent's tools and a reader take that long between two requests
LOOK_S = 0.25
POWER_LOOK_S = 10.0  # reading it runs a command
FORMS = "idle, plugged, and times such as 23:00-07:00"

Window = tuple[datetime.time, datetime.time]

_WINDOW = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")


@dataclass(frozen=True)
class LearnWhen:
    """The conditions; the default has none."""

    idle: bool = False
    plugged: bool = False
    windows: tuple[Window, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Conditions separated by commas; ValueError for one that is unknown."""
        windows: list[Window] = []
        words = [word.strip() for word in text.split(",") if word.strip()]
        for word in words:
            if word in ("idle", "plugged"):
                continue
            match = _WINDOW.fullmatch(word)
            if match is None:
                raise ValueError(f"{word!r} is no condition: {FORMS}")
            first_h, first_m, last_h, last_m = map(int, match.groups())
            try:
                window = datetime.time(first_h, first_m), datetime.time(last_h % 24, last_m)
            except ValueError as error:
                raise ValueError(f"{word!r} is no time of day: {error}") from error
            windows.append(window)
        return cls("idle" in words, "plugged" in words, tuple(windows))

    def __bool__(self) -> bool:
        return self != LearnWhen()

    def hindrance(self, now: datetime.time, power: Source, quiet_s: float) -> str:
        """Why training has to wait, for people; "": it may run. `quiet_s`: since the last interactive request."""
        if self.windows and not any(_within(window, now) for window in self.windows):
            return f"it trains from {' and '.join(f'{a:%H:%M} to {b:%H:%M}' for a, b in self.windows)}"
        if self.plugged and power == "battery":
            return "it trains while the machine is on mains"
        if self.idle and quiet_s < QUIET_S:
            return "it trains while no interactive request is there"
        return ""


def _within(window: Window, now: datetime.time) -> bool:
    first, last = window
    return first <= now < last if first < last else now >= first or now < last


class Permission:
    """Holds a run's work while a condition does not hold; a context manager that watches meanwhile.

    What cannot be read, because the ring is away, counts as a request: the run waits.
    """

    def __init__(
        self,
        when: LearnWhen,
        asked: Callable[[], Awaitable[bool]],
        changed: Callable[[str], None] = lambda hindrance: None,
        power: Callable[[], Source] = lambda: machine_power().source,
        clock: Callable[[], datetime.time] = lambda: datetime.datetime.now().time(),
    ) -> None:
        """`asked`: whether an interactive request waits or runs; `changed` gets each new hindrance, for the board."""
        self.when = when
        self._asked, self._changed, self._power, self._clock = asked, changed, power, clock
        self._source: Source = "unknown"
        self._last_asked = self._looked_at_power = float("-inf")  # monotonic
        self._open, self._may = threading.Event(), asyncio.Event()  # the same, for the thread and for the loop
        self._ending: asyncio.Event | None = None
        self._hindrance: str | None = None  # None: nobody has looked yet

    async def __aenter__(self) -> Self:
        if self.when.idle:
            await self._asked()  # a ring that will never answer is refused now
        await self._look()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel([self._watching])
        self._open.set()

    def hold(self) -> None:
        """Called in the computing thread between two units: returns when the next one may run."""
        self._open.wait()

    def ends_with(self, stop: asyncio.Event) -> None:
        """Set the event after which nothing is held any more: the run ends, with the step under way."""
        self._ending = stop

    async def wait(self) -> None:
        """Return when a train step may begin, or the run is to end."""
        await self._may.wait()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look()

    async def _look(self) -> None:
        now = time.monotonic()
        if self.when.plugged and now - self._looked_at_power >= POWER_LOOK_S:
            self._source, self._looked_at_power = await asyncio.to_thread(self._power), now
        if self.when.idle and await self._is_asked():
            self._last_asked = now
        hindrance = self.when.hindrance(self._clock(), self._source, now - self._last_asked)
        if not hindrance or (self._ending is not None and self._ending.is_set()):
            self._open.set()
            self._may.set()
        else:
            self._open.clear()
            self._may.clear()
        if hindrance != self._hindrance and (hindrance or self._hindrance is not None):
            log.info("train.waits" if hindrance else "train.goes_on", **({"why": hindrance} if hindrance else {}))
            self._changed(hindrance)
        self._hindrance = hindrance

    async def _is_asked(self) -> bool:
        try:
            return await self._asked()
        except (ParallmError, RedisError, OSError):
            return True
