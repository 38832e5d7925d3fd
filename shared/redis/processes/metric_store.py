"""The sum of all processes' tallies, in Redis: each process adds what it has counted, any api reads the whole.

Invariants. What was counted once is in the totals once, however often a write is repeated, and stays there when its
process dies (metrics_add.lua). The totals never shrink while Redis keeps its data; what a Redis that crashed had not
saved is added again with the next write, because a process tells its counts since its start.
"""

import asyncio
import contextlib
import secrets
import time

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.redis import keys
from shared.redis.connection.client import Argument, Script, ask
from shared.telemetry.metrics import Tally
from shared.telemetry.spans import Role

log = structlog.get_logger()

WRITE_EVERY_S = 2.0

_add = Script("metrics_add")


class MetricWriter:
    """Writes the tally of one process to Redis."""

    def __init__(self, redis: Redis, tally: Tally, role: Role, process_id: str) -> None:
        self._redis = redis
        self._tally = tally
        self._role = role
        self._key = keys.process_metrics(f"{process_id}.{secrets.token_hex(4)}")  # a worker's id may outlive a process
        self._sent: dict[str, float] = {}
        self._spoken = False

    async def write(self) -> None:
        """Add to the totals what has been counted since the last write."""
        fields = self._tally.fields()
        news = {field: value for field, value in fields.items() if self._sent.get(field) != value}
        if not await self._send("next" if self._spoken else "first", news):
            await self._send("again", self._sent)
            await self._send("next", news)
        self._spoken, self._sent = True, fields

    async def run(self) -> None:
        """Write again and again until cancelled; then once more."""
        try:
            while True:
                await asyncio.sleep(WRITE_EVERY_S)
                with contextlib.suppress(RedisError, OSError):
                    await self.write()
        finally:
            with contextlib.suppress(RedisError, OSError):  # TimeoutError is an OSError
                async with asyncio.timeout(1):
                    await self.write()

    async def _send(self, mode: str, fields: dict[str, float]) -> bool:
        now_ms = time.time_ns() // 1_000_000
        args: list[Argument] = [mode, keys.METRICS_PROCESS_TTL_S, keys.METRICS_TTL_S, self._role, now_ms]
        for field, value in fields.items():
            args += [field, repr(value)]
        return bool(await _add(self._redis, [self._key, keys.metric_totals()], args))


async def read_totals(redis: Redis) -> dict[str, float]:
    """The totals by field (`shared.telemetry.metrics.parse_field`)."""
    totals = await ask(redis, "HGETALL", keys.metric_totals())
    return {field.decode(): float(value) for field, value in totals.items()}
