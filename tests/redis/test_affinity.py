"""Which worker a sequence waits for: hints of warm prefixes and loaded adapters, and what they may not do."""

import asyncio

import pytest
from msgspec import structs
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.processes.worker_registry import WorkerRegistry, WorkerStatus
from shared.redis.queue import affinity
from shared.redis.queue.affinity import SHORTEST, Affinity, WarmNotes
from shared.sequences import SequenceSpec
from tests.redis.sequences import MODEL, beat, ids, plan, queue, spec, specs
from tests.waiting import HANG_S, NEVER_S


def asking(length: int, *, adapter: str = "", first: int = 0) -> SequenceSpec:
    """A sequence with a prompt of `length` ids; `first` makes another one from its first id on."""
    return structs.replace(spec("s"), prompt_ids=tuple(range(first, first + length)), adapter=adapter)


async def preferred(redis: Redis, *wanted: SequenceSpec) -> tuple[str, ...]:
    return await Affinity(redis, WorkerRegistry(redis)).preferred(wanted)


async def waiting_for(redis: Redis, worker: str) -> int:
    return int(await redis.xlen(keys.queue(MODEL, "interactive", worker)))


async def test_the_worker_that_computed_the_longest_beginning_is_preferred(redis: Redis) -> None:
    for worker in ("w1", "w2"):
        await beat(redis, worker)
    await WarmNotes(redis, MODEL, "w1").note([asking(SHORTEST)])
    assert await preferred(redis, asking(4 * SHORTEST)) == ("w1",)
    await WarmNotes(redis, MODEL, "w2").note([asking(2 * SHORTEST)])
    assert await preferred(redis, asking(4 * SHORTEST)) == ("w2",)
    assert await preferred(redis, asking(SHORTEST)) == ("w2",), "the last one that computed it"
    assert await preferred(redis, asking(SHORTEST - 1)) == ()
    assert await preferred(redis, asking(SHORTEST, first=1)) == ()
    assert await preferred(redis, asking(SHORTEST, adapter="a@1")) == (), "KV of the base is of no use to an adapter"


async def test_a_burst_looks_at_the_workers_once(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    for worker in ("w1", "w2"):
        await beat(redis, worker)
    registry, looks = WorkerRegistry(redis), 0
    read = registry.workers

    async def counted(model: str) -> list[WorkerStatus]:
        nonlocal looks
        looks += 1
        return await read(model)

    monkeypatch.setattr(registry, "workers", counted)
    hints = Affinity(redis, registry)
    await asyncio.gather(*(hints.preferred([asking(8)]) for _ in range(50)))
    assert looks == 1


async def test_prompts_enqueued_together_are_judged_by_their_common_beginning(redis: Redis) -> None:
    for worker in ("w1", "w2"):
        await beat(redis, worker)
    await WarmNotes(redis, MODEL, "w1").note([asking(4 * SHORTEST)])
    other = structs.replace(asking(2 * SHORTEST), prompt_ids=(*range(SHORTEST), *range(SHORTEST)))
    assert await preferred(redis, asking(4 * SHORTEST), other) == ("w1",)
    assert await preferred(redis, asking(4 * SHORTEST), asking(4 * SHORTEST, first=7)) == ()


async def test_workers_that_have_the_adapter_are_preferred_unless_all_have_it(redis: Redis) -> None:
    await beat(redis, "w1", versions=("a@1",))
    await beat(redis, "w2", versions=("a@2",))
    await beat(redis, "w3")
    assert await preferred(redis, asking(8, adapter="a@1")) == ("w1",)
    assert await preferred(redis, asking(8, adapter="a")) == (), "the latest is about to be everywhere"
    assert await preferred(redis, asking(8, adapter="a@3")) == await preferred(redis, asking(8)) == ()
    for worker in ("w1", "w2", "w3"):
        await beat(redis, worker, versions=("a@2",))
    assert await preferred(redis, asking(8, adapter="a@2")) == ()


async def test_notes_are_bounded(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MAX_NOTES", 4)
    notes = WarmNotes(redis, MODEL, "w1")
    for first in range(20):
        await notes.note([asking(SHORTEST, first=first)])
    (key,) = [key async for key in redis.scan_iter(f"parallm:{{{MODEL}}}:warm:*")]
    assert await redis.hlen(key) == 4
    assert 0 < await redis.ttl(key) <= 2 * keys.WARM_EPOCH_S


async def test_of_the_preferred_workers_the_least_busy_is_taken_and_busy_ones_are_passed_over(redis: Redis) -> None:
    q = queue(redis)
    for worker in ("w1", "w2"):
        await beat(redis, worker, max_rows=4)
    await q.enqueue(specs("a", 1))
    assert len(await q.claim("w1", plan(4))) == 1
    await q.enqueue(specs("b", 1), prefer=["w1", "w2"])
    assert ids(await q.claim("w2", plan(4))) == ["b0"]
    await q.enqueue(specs("c", 1), prefer=["w1"])
    assert await waiting_for(redis, "w1") == 1, "one row of four is not busy"
    await q.enqueue(specs("d", 1), prefer=["w1"])
    assert await waiting_for(redis, "w1") == 1, "half of the rows are taken, what waits counted"
    assert ids(await q.claim("w2", plan(4))) == ["d0"]


async def test_a_group_that_does_not_fit_a_preferred_worker_goes_to_all(redis: Redis) -> None:
    q = queue(redis)
    await beat(redis, "w1", max_rows=4)
    await q.enqueue(specs("g", 5, group="g"), prefer=["w1"])
    assert await waiting_for(redis, "w1") == 0
    assert len(await q.claim("w2", plan(8))) == 5


async def test_a_dead_paused_or_leaving_worker_is_not_waited_for(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("unknown", 1), prefer=["w1"])
    await beat(redis, "w1", state="paused")
    await q.enqueue(specs("paused", 1), prefer=["w1"])
    await beat(redis, "w1")
    await q.delete_worker_streams("w1")
    await q.enqueue(specs("leaving", 1), prefer=["w1"])
    assert ids(await q.claim("w2", plan(8))) == ["unknown0", "paused0", "leaving0"]


async def test_an_idle_worker_waits_no_longer_than_until_it_may_steal(redis: Redis) -> None:
    q = queue(redis)
    await beat(redis, "w1")
    assert await q.claim("w2", plan(8), others=["w1"]) == []
    waiting = asyncio.create_task(q.wait("w2", HANG_S))
    await q.enqueue(specs("s", 1), prefer=["w1"])
    assert await asyncio.wait_for(waiting, HANG_S), "it hears of what waits for others"
    taken = await q.claim("w2", plan(8), others=["w1"])
    if not taken:  # too young to be stolen
        assert not await asyncio.wait_for(q.wait("w2", NEVER_S), HANG_S)
        taken = await q.claim("w2", plan(8), others=["w1"])
    assert ids(taken) == ["s0"]
