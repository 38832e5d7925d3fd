"""In a large ring one process looks at the heartbeats for all."""

import asyncio
import zlib

import msgspec
import pytest
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.processes import worker_registry
from shared.redis.processes.worker_registry import WorkerRegistry
from tests.redis.sequences import MODEL, beat
from tests.waiting import wait_until

NAMES = zlib.compress(msgspec.msgpack.encode(["w0"] * 3))


async def asked(redis: Redis, command: str) -> int:
    return int((await redis.info("commandstats")).get(f"cmdstat_{command}", {"calls": 0})["calls"])


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_registry, "MANY", 3)
    monkeypatch.setattr("shared.redis.processes.shared_look.FRESH_MS", 600_000)
    monkeypatch.setattr("shared.redis.processes.shared_look.TURN_MS", 100)


@pytest.mark.usefixtures("many")
async def test_one_looks_at_the_heartbeats_of_a_large_ring_and_the_others_take_what_it_has_seen(redis: Redis) -> None:
    names = ["w0", "w1", "w2"]
    for name in names:
        await beat(redis, name, versions=("a@3",))
    ours = [WorkerRegistry(redis, shares=True) for _ in range(5)]
    first = await ours[0].workers(MODEL)
    assert await ours[0].live(MODEL) == names
    before = await asked(redis, "hgetall"), await asked(redis, "exists")
    for registry in ours:
        assert await registry.workers(MODEL) == first and await registry.live(MODEL) == names
    assert (await asked(redis, "hgetall"), await asked(redis, "exists")) == before
    assert [status.versions for status in first] == [("a@3",)] * 3
    await redis.delete(keys.worker(MODEL, "w1"))
    assert [each.id for each in await WorkerRegistry(redis).workers(MODEL)] == ["w0", "w2"], "who does not share"


@pytest.mark.usefixtures("many")
async def test_while_one_looks_the_others_go_by_what_they_knew_and_then_look_themselves(redis: Redis) -> None:
    for name in ("w0", "w1", "w2"):
        await beat(redis, name)
    registry = WorkerRegistry(redis)
    assert await registry.live(MODEL) == ["w0", "w1", "w2"]
    await redis.delete(keys.live_workers(MODEL), keys.worker(MODEL, "w1"))
    await redis.set(keys.live_turn(MODEL, "ids"), b"", ex=60)
    assert await registry.live(MODEL) == ["w0", "w1", "w2"], "somebody looks"
    assert await registry.live(MODEL) == ["w0", "w2"], "it has died meanwhile"


@pytest.mark.usefixtures("many")
async def test_of_many_that_start_at_once_one_looks(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.redis.processes.shared_look.TURN_MS", 3_000)
    names = [f"w{i:02}" for i in range(20)]
    for name in names:
        await beat(redis, name)
    registries = [WorkerRegistry(redis) for _ in names]
    before = await asked(redis, "exists")
    assert await asyncio.gather(*(registry.live(MODEL) for registry in registries)) == [names] * len(names)
    assert await asked(redis, "exists") == before + len(names)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(
    "kept",
    [b"", b"\xc1", b"\x93\x01\x02\x03", zlib.compress(b"\xc1"), zlib.compress(b"\x91\x81\xa2id\x01"), NAMES[:-8]],
)
async def test_what_is_no_look_is_passed_over(redis: Redis, kept: bytes) -> None:
    for name in ("w0", "w1", "w2"):
        await beat(redis, name)
    for key in (keys.live_workers, keys.live_statuses):
        await redis.set(key(MODEL), kept, ex=60)
    registry = WorkerRegistry(redis, shares=True)
    assert await registry.live(MODEL) == ["w0", "w1", "w2"]
    assert len(await registry.workers(MODEL)) == 3


async def test_a_small_ring_is_looked_at_anew_each_time(redis: Redis) -> None:
    registry = WorkerRegistry(redis, shares=True)
    await beat(redis, "w0")
    assert await registry.live(MODEL) == ["w0"]
    await beat(redis, "w1")
    assert await registry.live(MODEL) == ["w0", "w1"] and len(await registry.workers(MODEL)) == 2
    assert not await redis.exists(keys.live_workers(MODEL), keys.live_statuses(MODEL))


async def test_a_look_serves_for_a_second(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_registry, "MANY", 1)
    registry = WorkerRegistry(redis, shares=True)
    await beat(redis, "w0")
    assert await registry.live(MODEL) == ["w0"]
    await beat(redis, "w1")

    async def seen() -> bool:
        await asyncio.sleep(0.05)
        return await registry.live(MODEL) == ["w0", "w1"]

    await wait_until(seen)
