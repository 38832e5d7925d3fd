"""What each process of a ring under chaos holds as time goes by: memory, open files, threads; and what Redis holds.

A process that is killed ends its series, so slopes are of processes that have lived for WARM_S and as long again.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import psutil
from redis.exceptions import RedisError

from shared.redis.connection.client import connect
from shared.redis.connection.cluster import ClusterRedis
from tests.e2e.chaos_ring import ChaosRing

EVERY_S = 5.0
WARM_S = 120.0


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
                    servers = await redis.primaries() if isinstance(redis, ClusterRedis) else [redis]
                    for number, server in enumerate(servers):
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

    def lines(self) -> list[str]:
        """For each process that lived for long: memory after WARM_S and its slope (least squares), files, threads."""
        found = []
        for (name, pid), all_held in sorted(self.held.items()):
            held = [each for each in all_held if each.at - all_held[0].at >= WARM_S]
            if not held or held[-1].at - held[0].at < WARM_S:
                continue
            times = np.array([each.at - held[0].at for each in held]) / 3600
            memory = np.array([each.bytes for each in held]) / 2**20
            slope = float(np.polyfit(times, memory, 1)[0])
            kinds = ("keys", "clients") if name.startswith("redis-") else ("files", "threads")
            spans = [(min(values), max(values)) for values in zip(*((e.files, e.threads) for e in held), strict=True)]
            counts = ", ".join(f"{kind} {low} to {high}" for kind, (low, high) in zip(kinds, spans, strict=True))
            found.append(
                f"{name} ({pid}): {60 * times[-1]:.0f} min, {memory[0]:.1f} to {memory[-1]:.1f} MiB (at most "
                f"{memory.max():.1f}), slope {slope:+.1f} MiB/h = {100 * slope / memory.mean():+.1f}%/h; {counts}"
            )
        return found
