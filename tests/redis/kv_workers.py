"""Workers that fetch and hold KV, as far as that takes: with a real Redis and caches, without a model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import KVCache
from redis.asyncio import Redis

from mlx_model.config import DiskConfig
from shared.redis import keys
from shared.redis.connection.client import ask
from shared.sequences import SequenceSpec
from shared.telemetry.metrics import Tally
from tests.redis.sequences import MODEL, spec
from worker.engine.messages import RowRequest
from worker.engine.prefixes.disk.tier import DiskTier
from worker.engine.prefixes.disk.tiered_cache import TieredCache
from worker.engine.prefixes.prefix_cache import Prompt
from worker.engine.prefixes.sharing import SharedCache
from worker.engine.prefixes.slabs import KvRows
from worker.peers.directory import PeerDirectory
from worker.peers.fetching import FetchCounts, Fetching
from worker.peers.server import PeerServer
from worker.peers.store import EngineStore

T = TypeVar("T")
BLOCK = 16
IDS = tuple(range(400))
WHOLE = 399  # ids of a hit; the last one is fed in any case


def of(seq: str, ids: tuple[int, ...]) -> SequenceSpec:
    return msgspec.structs.replace(spec(seq), prompt_ids=ids)


class Engine:
    """A cache of prefixes, asked from the loop as an engine's thread is."""

    def __init__(self, identity: str = "model") -> None:
        self.cache: SharedCache = SharedCache(1 << 30, BLOCK, "base", [KVCache()], identity)

    def on_kv(self, call: Callable[[SharedCache], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(call(self.cache))
        except Exception as error:
            future.set_exception(error)
        return future

    def read(self, ids: tuple[int, ...] = IDS) -> None:
        kv, values = KVCache(), mx.repeat(mx.array(ids, mx.float32)[None, None, :, None], 8, axis=-1)
        kv.update_and_fetch(values, -values)
        self.cache.store([Prompt(ids, "")], KvRows.of([kv]))

    @property
    def known(self) -> int:
        return self.cache.known(IDS, "", len(IDS) - 1)


class Worker:
    """The part of a worker that fetches."""

    def __init__(self, redis: Redis, name: str, identity: str = "model") -> None:
        self.redis, self.name, self.engine, self.tally = redis, name, Engine(identity), Tally()
        self.store = EngineStore(self.engine, 1000)
        self.directory = PeerDirectory(redis, MODEL, name)
        self.token_s = 0.0
        counts = FetchCounts(self.tally, MODEL)
        self.fetching = Fetching(
            self.directory, self.store, counts, 1 << 30, lambda: self.token_s, lambda spec: spec.adapter
        )
        self.server = PeerServer(self.store, lambda: self.directory.secret)

    async def listen(self) -> int:
        await self.directory.look()
        port = self.server.listen("127.0.0.1")
        await tell(self.redis, self.name, port)
        return port

    async def fetch(self, holder: str, is_wanted: bool = True) -> None:
        await self.directory.look()
        request = RowRequest(of("s", IDS))
        await self.fetching.fetch(request, holder, lambda: is_wanted)

    def outcome(self, name: str) -> float:
        return self.tally.fields()[f"mlx_parallm_kv_fetches_total|{MODEL}|{name}"]


async def tell(redis: Redis, worker: str, port: int) -> None:
    await ask(redis, "HSET", keys.worker(MODEL, worker), "kv_address", f"127.0.0.1:{port}")
    await ask(redis, "EXPIRE", keys.worker(MODEL, worker), 10)


def cache_on_disk(folder: Path) -> TieredCache:
    tier = DiskTier(DiskConfig(str(folder)), "base", "model", BLOCK, 1 << 30, None)
    return TieredCache(1 << 30, BLOCK, "base", [KVCache()], "model", tier, through=True, token_s=lambda: 0.0)


@contextlib.asynccontextmanager
async def on_disk(worker: Worker, folder: Path, ids: tuple[int, ...]) -> AsyncIterator[None]:
    """A worker that has started anew over files of the KV of these ids."""
    before = Engine()
    before.cache = cache_on_disk(folder)
    before.read(ids)
    before.cache.close(keep=True)
    worker.engine.cache = cache = cache_on_disk(folder)
    assert worker.engine.known == 0

    async def turn() -> None:
        while True:
            cache.work()
            await asyncio.sleep(0.001)

    turning = asyncio.create_task(turn())
    yield
    turning.cancel()
    cache.close(keep=False)
