"""The load of one api process: what is under way, at what pace it ends, and which queues have just been found full.

Refusing must cost next to nothing when most requests are refused. So after a queue has said that it is full, requests
are refused before they are read, until a tenth of the queue has been worked off: workers never run dry meanwhile.
"""

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator

import structlog

from shared.sequences import SequenceClass
from shared.telemetry.metrics import Tally

log = structlog.get_logger()

WINDOW_S = 10.0  # over which the pace of finished requests is measured
LONGEST_RETRY_S = 30
LONGEST_SHED_S = 0.5
LAG_LOOK_S = 0.05
LAG_LIMIT_S = 0.5  # from here on this process is the bottleneck, and what it accepts would wait in it
FEW = 8  # requests under way: up to here the machine has too much to do, not this process, and refusing does not help
ALARM_S = 1.0  # a stop of the event loop that /health reports
REMEMBERED_S = 60.0


class ProcessLoad:
    """The load of this api process."""

    def __init__(self, limit: int, tally: Tally | None = None) -> None:
        self.limit = limit  # 0: none
        self._lag = (tally or Tally()).histogram("mlx_parallm_api_loop_lag_seconds")
        self._stops: deque[tuple[float, float]] = deque(maxlen=1000)  # when, and for how long, of late
        self.under_way = 0
        self.by_key: Counter[str] = Counter()
        self._ended: deque[float] = deque(maxlen=1000)
        self.lag_s = 0.0  # how late the event loop has been lately
        self._full: dict[tuple[str, SequenceClass], float] = {}  # until when we do not ask the queue again

    @property
    def utilization(self) -> float:
        """Requests under way over their bound; 0 without one."""
        return self.under_way / self.limit if self.limit else 0.0

    @property
    def lags(self) -> bool:
        """True if the event loop is late while many requests are under way."""
        return self.lag_s > LAG_LIMIT_S and self.under_way > FEW

    @property
    def longest_stop_s(self) -> float:
        """Longest time for which the event loop served no request, within the last minute."""
        since = time.monotonic() - REMEMBERED_S
        return max((seconds for at, seconds in self._stops if at > since), default=0.0)

    @property
    def stood_still(self) -> bool:
        """True if the longest recent stop of the event loop is long enough to be reported."""
        return self.longest_stop_s >= ALARM_S

    async def watch(self) -> None:
        """Measure the event loop's lag, for ever; an old lag fades within half a second."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(LAG_LOOK_S)
            self.looked(time.monotonic() - began - LAG_LOOK_S)

    def looked(self, late_s: float) -> None:
        """Note how late the event loop has come."""
        self.lag_s = max(0.75 * self.lag_s, late_s)
        self._lag.observe(max(0.0, late_s))
        if late_s > LAG_LOOK_S:
            self._stops.append((time.monotonic(), late_s))
        if late_s > ALARM_S:
            log.warning("api.loop_stopped", seconds=round(late_s, 2), requests=self.under_way)

    @contextlib.contextmanager
    def one(self, key: str) -> Iterator[None]:
        """Counts one request as under way while it is handled."""
        self.under_way += 1
        self.by_key[key] += 1
        try:
            yield
        finally:
            self.under_way -= 1
            self.by_key[key] -= 1
            if not self.by_key[key]:
                del self.by_key[key]
            self._ended.append(time.monotonic())

    def pace(self) -> float:
        """Requests that end in a second, of late; 1 when none has."""
        now = time.monotonic()
        recent = [at for at in self._ended if now - at < WINDOW_S]
        return len(recent) / max(1.0, now - recent[0]) if recent else 1.0

    def retry_after_s(self, ahead: int = 1) -> int:
        """Seconds until `ahead` more requests will have ended at the present pace, 1 to LONGEST_RETRY_S."""
        return max(1, min(LONGEST_RETRY_S, math.ceil(ahead / self.pace())))

    def note_full(self, model: str, kind: SequenceClass, bound: int) -> int:
        """The queue has just refused: do so in its place until a tenth of it has been worked off; a `Retry-After`."""
        tenth = max(1, bound // 10)
        self._full[model, kind] = time.monotonic() + min(LONGEST_SHED_S, tenth / self.pace())
        return self.retry_after_s(tenth)

    def all_full(self, models: Collection[str], kind: SequenceClass) -> bool:
        """True if each of these models refused lately: then nothing else about a request matters."""
        now = time.monotonic()
        return bool(models) and all(self._full.get((model, kind), 0.0) > now for model in models)
