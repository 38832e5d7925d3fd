"""What each process of a ring under chaos holds as time goes by: memory, open files, threads; and what Redis holds.

A process that is killed ends its series, so slopes are of processes that have lived for WARM_S and as long again.
"""

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np
import psutil
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.connection.cluster import ClusterRedis
from tests.e2e.chaos_ring import ChaosRing

EVERY_S = 5.0
WARM_S = 240.0  # until caches are full
JUDGED_S = 480.0  # of a series after WARM_S, for a verdict on its slope
PARTS = 6  # of a series, whose means the slope is taken of
FLAT = 1.0  # % an hour
SHOWN = 12  # kinds of keys

Row = tuple[str, ...]
HEAD: Row = ("process", "min", "MiB", "at most", "last", "MiB/h", "%/h", "files, keys", "threads, clients")


class Held(NamedTuple):
    """What a process held at a time; of Redis: bytes of data, keys, clients."""

    at: float
    bytes: int
    files: int
    threads: int


class Observer:
    """Looks at all processes every EVERY_S, until it is cancelled."""

    def __init__(self, ring: ChaosRing) -> None:
        self._ring = ring
        self.held: dict[tuple[str, int], list[Held]] = defaultdict(list)  # by name and process id

    async def run(self) -> None:
        redis = connect(self._ring.redis.url)
        try:
            while True:
                for member in self._ring.members:
                    if member.process is not None:
                        await asyncio.to_thread(self._look, member.name, member.pid)
                with contextlib.suppress(RedisError, OSError):
                    for number, server in enumerate(await _servers(redis)):
                        info = await server.info()
                        held = Held(
                            time.monotonic(), info["used_memory"], await server.dbsize(), info["connected_clients"]
                        )
                        self.held[f"redis-{number}", 0].append(held)
                await asyncio.sleep(EVERY_S)
        finally:
            await redis.aclose()

    def _look(self, name: str, pid: int) -> None:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error), each.oneshot():
                    held = Held(time.monotonic(), each.memory_info().rss, each.num_fds(), each.num_threads())
                    self.held[name if each.pid == pid else f"{name}'s child", each.pid].append(held)

    async def table(self) -> tuple[list[str], list[str]]:
        """Lines of a table of processes that lived for long, and of keys by kind; names of processes that grew."""
        rows, grown = [HEAD], []
        for (name, pid), all_held in sorted(self.held.items()):
            held = [each for each in all_held if each.at - all_held[0].at >= WARM_S]
            if not held or held[-1].at - held[0].at < WARM_S:
                continue
            row, grows = _row(name, held)
            rows.append(row)
            if grows and held[-1].at - held[0].at >= JUDGED_S:
                grown.append(f"{name} ({pid})")
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return [*lines, await self._keys()], grown

    async def _keys(self) -> str:
        redis = connect(self._ring.redis.url)
        try:
            found = [key.decode() for server in await _servers(redis) async for key in server.scan_iter(count=1000)]
        finally:
            await redis.aclose()
        patterns = [kind.pattern for kind in keys.DOCUMENTED]
        counts = Counter(next((each for each in patterns if fnmatchcase(key, each)), "unknown") for key in found)
        most = ", ".join(f"{pattern} {count}" for pattern, count in counts.most_common(SHOWN))
        return f"keys: {counts.total()} of {len(counts)} kinds: {most}"


async def _servers(redis: Redis) -> list[Redis]:
    return await redis.primaries() if isinstance(redis, ClusterRedis) else [redis]


def _row(name: str, held: list[Held]) -> tuple[Row, bool]:
    """A row of the table, with the slope's standard error; whether memory grows by more than FLAT and two errors."""
    hours = np.array([each.at - held[0].at for each in held]) / 3600
    memory = np.array([each.bytes for each in held]) / 2**20
    means = np.array([(h.mean(), m.mean()) for h, m in zip(*_parted(hours, memory), strict=True)])
    (slope, _), spread = np.polyfit(means[:, 0], means[:, 1], 1, cov=True)
    error, share = float(np.sqrt(spread[0, 0])), 100 / float(memory.mean())
    counts = [f"{min(values)} to {max(values)}" for values in zip(*((e.files, e.threads) for e in held), strict=True)]
    figures = (f"{60 * hours[-1]:.0f}", f"{memory[0]:.1f}", f"{memory.max():.1f}", f"{memory[-1]:.1f}")
    slopes = (f"{slope:+.1f} ±{error:.1f}", f"{share * slope:+.1f} ±{share * error:.1f}")
    return (name, *figures, *slopes, *counts), share * (slope - 2 * error) > FLAT


def _parted(*series: np.ndarray) -> list[list[np.ndarray]]:
    return [np.array_split(each, PARTS) for each in series]
