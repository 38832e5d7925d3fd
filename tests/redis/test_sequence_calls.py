"""Calls to workers from a process that waits for whole results: a trainer's rollouts, a judge's verdicts."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec import structs
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.queue import sequence_calls
from shared.redis.queue.affinity import SHORTEST, WarmNotes
from shared.redis.queue.sequence_calls import SequenceCalls
from shared.redis.queue.sequence_queue import SequenceQueue
from shared.sequences import SequenceSpec
from tests.redis.job_fakes import MODEL, FakeWorker, codec, register, working
from tests.redis.sequences import MODEL as OTHER
from tests.redis.sequences import beat, spec
from tests.waiting import wait_until


@pytest.fixture
async def calls(redis: Redis) -> AsyncIterator[SequenceCalls]:
    await register(redis)
    async with SequenceCalls(redis, MODEL, "caller") as made:
        yield made


def asking(count: int) -> list[SequenceSpec]:
    base = structs.replace(spec("s", kind="batch", job="caller"), model=MODEL)
    return [structs.replace(base, id=f"caller-{i}", prompt_ids=tuple(codec().encode(f"say {i}"))) for i in range(count)]


def said(results: list) -> list[str]:
    return [codec().decode(result.completion_ids) for result in results]


async def test_results_come_in_the_order_of_asking(redis: Redis, calls: SequenceCalls) -> None:
    def last_first(sequence: SequenceSpec) -> str | None:
        return sequence.id[-1] if sequence.id == "caller-7" or "caller-7" in worker.seen[:8] else None

    worker = FakeWorker(redis, last_first)
    async with working(worker):
        wanted = asking(8)
        assert said(await calls.call(wanted)) == [str(i) for i in range(8)]
        assert len(worker.seen) == 8
    assert await redis.xlen(keys.finished(MODEL, "caller")) == 0


async def test_a_cancelled_call_cancels_its_sequences(redis: Redis, calls: SequenceCalls) -> None:
    worker = FakeWorker(redis, lambda sequence: None)
    async with working(worker):
        asked = asyncio.create_task(calls.call(asking(3)))
        await wait_until(lambda: len(worker.busy) == 3)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await wait_until(lambda: not worker.busy)


async def test_what_redis_lost_is_enqueued_anew(
    redis: Redis, calls: SequenceCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_calls, "REPAIR_AFTER_S", 0.2)
    asked = asyncio.create_task(calls.call(asking(2)))
    stream = keys.queue(MODEL, "batch", "")
    await wait_until(lambda: _length(redis, stream, 2))
    await redis.delete(stream, *(keys.sequence(MODEL, each.id) for each in asking(2)))
    async with working(FakeWorker(redis)) as worker:
        assert said(await asked) == ["0", "1"]
        assert sorted(worker.seen) == ["caller-0", "caller-1"]


async def _length(redis: Redis, stream: str, count: int) -> bool:
    return bool(await redis.xlen(stream) == count)


async def test_an_unreadable_result_is_an_error_and_not_a_silence(redis: Redis, calls: SequenceCalls) -> None:
    asked = asyncio.create_task(calls.call(asking(2)))
    await wait_until(lambda: _length(redis, keys.queue(MODEL, "batch", ""), 2))
    await redis.xadd(keys.finished(MODEL, "caller"), {"id": "caller-1", "result": b"\xc1"})
    with pytest.raises(Exception, match="unreadable"):
        await asked


async def test_a_later_turn_waits_for_the_worker_that_computed_the_earlier_one(redis: Redis) -> None:
    """Without the preference, half of all second turns would compute their whole prompt anew."""
    for worker in ("w1", "w2"):
        await beat(redis, worker)
    first = structs.replace(spec("t", kind="batch", job="caller"), prompt_ids=tuple(range(2 * SHORTEST)))
    await WarmNotes(redis, OTHER, "w2").note([first])
    second = structs.replace(first, prompt_ids=(*first.prompt_ids, 7, 8, 9))
    async with SequenceCalls(redis, OTHER, "caller") as calls:
        asked = asyncio.create_task(calls.call([second]))
        await wait_until(lambda: _length(redis, keys.queue(OTHER, "batch", "w2"), 1))
        await SequenceQueue(redis, OTHER).cancel(["t"])
        (result,) = await asked
        assert result.finish.reason == "cancelled"
