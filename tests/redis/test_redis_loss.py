"""Redis comes back without the last things it was told: what can be had again is, and the rest is said to be lost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from shared.frames import Finish, TokenEvent
from shared.redis import keys
from shared.redis.tokens.log import read_tokens
from shared.redis.tokens.writer import FrameWriter
from shared.sequences import Claim, SequenceSpec
from shared.telemetry.metrics import Tally
from tests.redis.api_servers import api
from tests.redis.scripted_worker import MODEL, Answer, working
from tests.redis.sequences import MODEL as M
from tests.redis.sequences import plan, queue, spec, state, tokens
from tests.waiting import wait_until
from worker.publisher import TokenPublisher
from worker.reports import SequenceCounts
from worker.rows import ClaimedRow, ClaimedRows

TEXT = "said after all"
BODY = {"prompt": "go", "max_tokens": 100, "stream_options": {"include_event_ids": True}}


def held(spec: SequenceSpec) -> Answer:
    return Answer(TEXT, hold_at=5)


async def forget(redis: Redis) -> None:
    """As after a restart without the last second: no request, no queue, no sequence, no log."""
    names = [key async for key in redis.scan_iter(match=f"parallm:{{{MODEL}}}:*") if not key.endswith(b":model")]
    names += [key async for key in redis.scan_iter(match=keys.request("*"))]
    kept = [name for name in names if b":worker" in name]
    await redis.delete(*(set(names) - set(kept)))


async def test_a_request_that_redis_lost_before_anybody_saw_it_is_answered_all_the_same(
    redis: Redis, redis_url: str
) -> None:
    async with working(redis_url, lambda spec: Answer(TEXT)) as worker, api(redis_url) as server:
        worker.paused = True
        asking = asyncio.create_task(server.post("/v1/completions", {"prompt": "go"}))

        async def waits() -> bool:
            return bool(await redis.keys(keys.sequence(MODEL, "*")))

        await wait_until(waits)
        await forget(redis)
        worker.paused = False
        answer = await asking
    assert answer.json()["choices"][0]["text"] == TEXT


async def test_a_request_in_an_emptied_redis_waits_under_a_living_reader(redis: Redis, redis_url: str) -> None:
    """Workers cancel interactive sequences whose api has no heartbeat, and FLUSHALL takes that, too."""
    async with working(redis_url, lambda spec: Answer(TEXT)) as worker, api(redis_url) as server:
        worker.paused = True
        asking = asyncio.create_task(server.post("/v1/completions", {"prompt": "go"}))

        async def waits() -> bool:
            return bool(await redis.keys(keys.sequence(MODEL, "*")))

        await wait_until(waits)
        await redis.flushall()
        await worker.join()
        await wait_until(waits)
        assert await redis.exists(keys.api(server.ring.api_id))
        worker.paused = False
        answer = await asking
    assert answer.json()["choices"][0]["text"] == TEXT


async def test_a_stream_that_redis_lost_and_its_api_enqueued_anew_can_be_resumed_elsewhere(
    redis: Redis, redis_url: str
) -> None:
    async with working(redis_url, held) as worker, api(redis_url) as first, api(redis_url) as second:
        async with first.stream("/v1/completions", BODY) as begun:
            await begun.next()
            before = len(worker.specs)
            await forget(redis)
            await wait_until(lambda: len(worker.specs) > before)
        async with second.resume(begun.chunks[0]["id"], begun.last_event_id) as resumed:
            worker.go.set()
            await resumed.all()
    assert resumed.done
    assert "".join(chunk["choices"][0]["text"] for chunk in (*begun.chunks, *resumed.chunks)) == TEXT


async def test_a_resumed_stream_that_redis_lost_says_so(redis: Redis, redis_url: str) -> None:
    async with working(redis_url, held) as worker, api(redis_url) as first, api(redis_url) as second:
        async with first.stream("/v1/completions", BODY) as begun:
            await begun.next()
        async with second.resume(begun.chunks[0]["id"], begun.last_event_id) as resumed:
            await resumed.next()
            await forget(redis)
            last = (await resumed.all())[-1]
        worker.cancelled += [spec.id for spec in worker.specs]  # let it go
    assert "lost" in last["error"]["message"]
    assert last["error"]["code"] == "service_unavailable"


@contextlib.asynccontextmanager
async def publishing(redis: Redis, claim: Claim) -> AsyncIterator[TokenPublisher]:
    rows = ClaimedRows()
    rows.add(ClaimedRow.after(claim, []))

    async def ours() -> None:
        publisher.verified_at = asyncio.get_running_loop().time()

    publisher = TokenPublisher(
        FrameWriter(redis, M, "w"), rows, "w",
        log_every_tokens=4, verify=ours, stale_after_s=60,
        counts=SequenceCounts(Tally(), M),
    )  # fmt: skip
    task = asyncio.create_task(publisher.run())
    yield publisher
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("ends", [False, True])
async def test_a_log_that_lost_its_end_is_written_anew_without_a_gap(redis: Redis, ends: bool) -> None:
    await queue(redis).enqueue([spec("s", api="a")])
    (claim,) = await queue(redis).claim("w", plan(1))
    key, logs = keys.sequence(M, "s"), keys.sequence_log(M, "s")

    async def logged(count: int) -> bool:
        return len(flat(await read_tokens(redis, M, "s", 0))) == count

    async with publishing(redis, claim) as publisher:
        publisher.take([tokens("s", 0, 4)])
        publisher.take([tokens("s", 4, 4)])
        await wait_until(lambda: logged(8))
        await redis.delete(logs)
        await redis.hdel(key, "logged")
        more: list[TokenEvent] = [tokens("s", 8, 3, finish=Finish("stop")) if ends else tokens("s", 8, 4)]
        publisher.take(more)
        await wait_until(lambda: logged(11 if ends else 12))
    assert flat(await read_tokens(redis, M, "s", 0)) == list(range(1000, 1011 if ends else 1012))
    assert await state(redis, "s") == ("done" if ends else "running")


def flat(events: list[TokenEvent]) -> list[Any]:
    return [token for event in events for token in event.tokens]
