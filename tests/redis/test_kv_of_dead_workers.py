"""KV of a worker that has died: it comes from a living one that shares the folder of its files."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from mlx_model.config import DiskConfig, EngineConfig
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings
from shared.redis import keys
from shared.sequences import ModelCard
from shared.telemetry.metrics import Tally
from tests.redis.kv_workers import IDS, WHOLE, Worker, of, on_disk, tell
from tests.redis.sequences import MODEL, beat, plan, queue
from tests.waiting import wait_until
from worker.engine.messages import RowRequest
from worker.engine.prefixes.disk.folder import LOCK
from worker.engine.thread import EngineThread
from worker.peers.directory import PeerDirectory
from worker.peers.exchange import KvExchange


@pytest.fixture
async def sharer(redis: Redis, tmp_path: Path) -> AsyncIterator[Worker]:
    """A living worker over the files that the dead one has left."""
    made = Worker(redis, "sharer")
    async with on_disk(made, tmp_path, IDS):
        await lives(made, "folder")
        yield made
    await made.server.close()
    made.store.close()


@pytest.fixture
async def heir(redis: Redis) -> AsyncIterator[Worker]:
    made = Worker(redis, "heir")
    yield made
    made.store.close()


async def lives(worker: Worker, folder: str) -> None:
    await beat(worker.redis, worker.name)
    await worker.listen()
    await worker.directory.look(folder)


async def has_died(redis: Redis, folder: str, *, lately: bool = False) -> None:
    """Of the worker `dead`, only Redis knows; `lately`: its heartbeat is still there, too."""
    await PeerDirectory(redis, MODEL, "dead").look(folder)
    await beat(redis, "dead")
    await tell(redis, "dead", 1)  # nobody listens there
    if not lately:
        await redis.delete(keys.worker(MODEL, "dead"))


async def test_whoever_goes_on_with_a_dead_workers_sequence_learns_who_had_it(redis: Redis, heir: Worker) -> None:
    work = queue(redis, lease_ms=0)
    await work.enqueue([of("s", IDS)])
    await work.claim("dead", plan(1))
    (claim,) = await work.reap("heir", 1)
    assert await heir.directory.holders([RowRequest(claim.spec, claim.attempt)]) == {"s": "dead"}


@pytest.mark.parametrize("lately", [True, False])
async def test_a_worker_that_shares_the_files_gives_what_the_dead_one_had(
    redis: Redis, lately: bool, sharer: Worker, heir: Worker
) -> None:
    await has_died(redis, "folder", lately=lately)
    await heir.fetch("dead")
    assert heir.engine.known == WHOLE and sharer.server.given == 1
    assert (heir.outcome("fetched"), heir.outcome("failed")) == (1, lately)
    heir.engine.cache.clear()
    await heir.fetch("dead")
    assert sharer.server.given == 2 and heir.outcome("failed") == lately, "the dead one is not asked again"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("another", ""), ("", ""), ("folder", "folder")],
    ids=["of another folder", "without files", "of our own folder, which we have read"],
)
async def test_nobody_else_is_asked(redis: Redis, theirs: str, ours: str, sharer: Worker, heir: Worker) -> None:
    await has_died(redis, theirs)
    await heir.directory.look(ours)
    assert await heir.directory.sharers("dead") == []
    await heir.fetch("dead")
    assert sharer.server.given == 0 and heir.engine.known == 0
    assert heir.outcome("failed") == heir.outcome("computed") == 0


async def test_of_several_the_one_is_asked_that_has_shown_life_last(redis: Redis, sharer: Worker, heir: Worker) -> None:
    await has_died(redis, "folder")
    for at, name in enumerate(("dead with it", "sharer", "deaf")):
        await PeerDirectory(redis, MODEL, name).look("folder")
        await redis.zadd(keys.workers(MODEL), {name: 1000 + at})
    await tell(redis, "dead with it", 1)
    assert await heir.directory.sharers("dead") == ["sharer", "dead with it"]
    await heir.fetch("dead")
    assert sharer.server.given == 1 and heir.outcome("failed") == 0


async def test_an_idle_worker_tells_of_its_folder(redis: Redis, tmp_path: Path) -> None:
    config = EngineConfig("models/tiny", max_rows=1, disk=DiskConfig(str(tmp_path)))
    engine = EngineThread(config, lambda output: None, lambda error: None)
    engine.start()
    card = ModelCard(MODEL, 1000, 300, (1,), "", "", 8, "float32")
    exchange = KvExchange(
        load(WorkerSettings, ["--kv-transfer", "--kv-transfer-host", "127.0.0.1"]), redis, engine, card, "idle"
    )
    try:
        exchange.open(Tally())

        async def is_told() -> bool:
            await exchange.tend()
            return bool(await redis.exists(keys.kv_folder(MODEL, "idle")))

        await wait_until(is_told)
        told = await redis.get(keys.kv_folder(MODEL, "idle"))
        assert told and tmp_path.joinpath(LOCK).read_bytes().endswith(told)
    finally:
        await exchange.close()
        await asyncio.to_thread(engine.stop)


async def test_a_folder_is_known_for_a_while_after_its_workers_death(redis: Redis, heir: Worker) -> None:
    await heir.directory.look()
    assert not await redis.exists(keys.kv_folder(MODEL, "heir")), "it has none"
    await heir.directory.look("folder")
    assert keys.WORKER_TTL_S < await redis.ttl(keys.kv_folder(MODEL, "heir")) <= keys.KV_FOLDER_TTL_S
