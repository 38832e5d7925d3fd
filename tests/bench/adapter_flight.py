"""Token frames while a 100 MB adapter is in flight: `python -m tests.bench.adapter_flight`.

Latency from write to reader at 100 decode steps a second (32 rows), alone and while another process uploads 100 MB and
fetches them again, over and over, through the same Redis (append-only file on). Turns alternate; the figure is the
ratio of the p99s; between the turns Redis comes to rest. The aim is at most 2.
"""

import hashlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from api.serve.embedded_redis import EmbeddedRedis
from shared.adapters import AdapterManifest
from shared.redis import keys
from shared.redis.adapters.catalog import AdapterCatalog
from shared.redis.adapters.store import upload
from shared.redis.chunks import CHUNK_BYTES, Chunks
from shared.redis.connection.client import connect
from tests.bench.frames import STEPS_A_SECOND, measure
from tests.waiting import wait_until

SIZE = 100_000_000
ROUNDS = 5
SECONDS = 4.0


def fly(url: str, folder: str, flights: "multiprocessing.sharedctypes.Synchronized[int]") -> None:
    """Upload and fetch until killed."""
    path = Path(folder) / "adapter.bin"
    data = os.urandom(SIZE)
    path.write_bytes(data)
    uvloop.run(fly_forever(url, path, hashlib.sha256(data).hexdigest(), flights))


async def fly_forever(
    url: str, path: Path, sha256: str, flights: "multiprocessing.sharedctypes.Synchronized[int]"
) -> None:
    redis = connect(url)
    manifest = AdapterManifest(
        name="bench",
        version=1,
        kind="lora",
        rank=8,
        scale=1.0,
        modules=(),
        base_sha256="",
        parent=0,
        sha256=sha256,
        size=SIZE,
        chunk_size=CHUNK_BYTES,
        created_ms=time.time_ns() // 1_000_000,
    )
    key = keys.adapter_bytes("bench", 1)
    while True:
        await upload(Chunks(redis, key), path, sha256)
        async for _ in AdapterCatalog(redis).fetch(manifest):
            pass
        await redis.unlink(key)
        flights.value += 1


async def p99(url: str) -> float:
    _, latencies = await measure(url, 32, int(SECONDS * STEPS_A_SECOND), 1 / STEPS_A_SECOND, 1)
    return latencies[int(len(latencies) * 0.99)]


async def settle(url: str) -> None:
    """Wait until Redis is done with the flights: 100 MB to free, and an append-only file that it writes anew.

    Without this the turn that should be alone ran beside the rewrite, and its p99 was that of the disk.
    """
    redis = connect(url)
    await redis.unlink(keys.adapter_bytes("bench", 1))

    async def rests() -> bool:
        info = {**await redis.info("persistence"), **await redis.info("memory")}
        busy = (
            "aof_rewrite_in_progress",
            "aof_rewrite_scheduled",
            "rdb_bgsave_in_progress",
            "lazyfree_pending_objects",
        )
        return not any(int(info.get(name, 0)) for name in busy)

    await wait_until(rests)
    await redis.aclose()


async def main() -> None:
    """Print the ratio, min median max."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder)) as server:
        context = multiprocessing.get_context("spawn")
        alone: list[float] = []
        beside: list[float] = []
        total = 0
        for _ in range(ROUNDS):
            alone.append(await p99(server.url))
            flights = context.Value("i", 0)
            child = context.Process(target=fly, args=(server.url, folder, flights), daemon=True)
            child.start()
            await wait_until(lambda flown=flights: bool(flown.value))  # imports and the first are not measured
            before = flights.value
            beside.append(await p99(server.url))
            total += flights.value - before
            child.kill()
            child.join()
            await settle(server.url)
        ratios = [b / a for a, b in zip(alone, beside, strict=True)]
        print(
            f"p99 alone {statistics.median(alone):.2f} ms, with {SIZE // 10**6} MB in flight "
            f"{statistics.median(beside):.2f} ms ({total} flights in {ROUNDS * SECONDS:.0f} s); ratio min median max "
            f"{min(ratios):.2f} {statistics.median(ratios):.2f} {max(ratios):.2f}"
        )


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
