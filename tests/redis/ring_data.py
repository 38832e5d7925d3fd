"""A ring's data: what clients, a trainer and workers leave in Redis, and what must be there again later.

`python -m tests.redis.ring_data FILE` writes the data of this version of the code to a file, as `data/` has them of
earlier versions: each key's DUMP with its time to live, since a copy of the server's files would have expired. To
record those of an earlier version, run this file in a checkout of it.
"""

import asyncio
import lzma
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis

from api.serve.embedded_redis import EmbeddedRedis
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.client import connect
from shared.redis.training.trajectory_queue import TrajectoryQueue
from shared.sequences import SequenceSpec
from shared.trajectories import LiveTrajectory
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer, working
from tests.unit.trainer_samples import trajectory

POLICY, TEXT = "policy", "said before"
GREEDY = {"model": MODEL, "max_tokens": 32, "temperature": 0}


@dataclass(frozen=True)
class Left:
    """Names of what was left."""

    completion: str  # that ended
    response: str  # that is stored
    waiting: str  # a streamed completion that no worker had claimed
    file: str
    job: str  # that no runner had begun


def script(spec: SequenceSpec) -> Answer:
    return Answer(TEXT)


async def leave(redis: Redis, redis_url: str) -> Left:
    """Leave some of everything."""
    store = AdapterStore(redis)
    for seed in (1, 2):
        await publish(store, POLICY, seed=seed)
    queue = TrajectoryQueue(redis, POLICY)
    for number in range(3):
        await queue.add(LiveTrajectory(f"t{number}", POLICY, MODEL, trajectory(float(number))))
    lasting = {"feedback_ttl_days": 365, "background_timeout_s": 3e8}  # what is recorded is read years later
    async with working(redis_url, script) as worker, api(redis_url, **lasting) as server:
        ended = (await server.post("/v1/completions", {**GREEDY, "prompt": "ended"})).raise_for_status().json()
        stored = (await server.post("/v1/responses", {"model": MODEL, "input": "stored"})).raise_for_status().json()
        sent = {"file": ("notes.jsonl", b'{"a": 1}\n'), "purpose": (None, "user_data")}
        file = (await server.http.post("/v1/files", files=sent)).raise_for_status().json()
        worker.paused = True
        asked = {"kind": "generate", "model": MODEL, "prompts": ["one", "two"], "n": 2, "max_tokens": 8}
        job = (await server.post("/v1/jobs", asked)).raise_for_status().json()
        waiting = await _left_waiting(server)
    return Left(ended["id"], stored["id"], waiting, file["id"], job["id"])


async def _left_waiting(server: Api) -> str:
    """A background response, which outlives its api; no worker takes it."""
    body: dict[str, Any] = {"model": MODEL, "input": "waiting", "background": True}
    return str((await server.post("/v1/responses", body)).raise_for_status().json()["id"])


async def dumped(redis: Redis) -> list[tuple[bytes, int, bytes]]:
    """All keys: name, milliseconds to live (0: for ever), DUMP."""
    found = []
    for key in sorted([key async for key in redis.scan_iter(count=1000)]):
        ttl, value = max(0, await redis.pttl(key)), await redis.dump(key)
        if value is not None:
            found.append((key, ttl, value))
    return found


async def restore(redis: Redis, recorded: bytes) -> Left:
    """Put a file's keys into an empty Redis."""
    left, entries = msgspec.msgpack.decode(lzma.decompress(recorded), type=tuple[Left, list[tuple[bytes, int, bytes]]])
    for key, ttl, value in entries:
        await redis.restore(key, ttl, value)
    return left


async def _recorded() -> bytes:
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder)) as server:
        redis = connect(server.url)
        left = await leave(redis, server.url)
        data = await dumped(redis)
        await redis.aclose()
    return lzma.compress(msgspec.msgpack.encode((left, data)))


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(asyncio.run(_recorded()))
