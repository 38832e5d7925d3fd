"""What survives an outage of Redis, however it ends: with a restart, or with the promotion of another server."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import redis as sync_redis
from redis.asyncio import Redis

from shared.redis.tokens.log import read_tokens
from shared.redis.tokens.reader import FrameReader
from shared.redis.tokens.writer import FrameWriter
from tests.redis.sequences import MODEL, commit, ending, gathered, ids, plan, queue, spec, stop, tokens
from tests.waiting import HANG_S, wait_until


def write_at_once(url: str) -> None:
    """From here on, a Redis that is killed has all that it acknowledged.

    With `appendfsync everysec` it holds writes back, for up to 2 s, while a slow disk takes those of the second before.
    """
    with sync_redis.Redis.from_url(url) as client:
        client.config_set("appendfsync", "no")


class Outages(Protocol):
    """A Redis that can go away."""

    async def safe(self, redis: Redis) -> None:
        """Wait until what has been acknowledged would survive."""

    def away(self) -> AbstractAsyncContextManager[object]:
        """Inside, Redis is gone; behind it, it (or another) is there again."""


async def sequences_end_exactly_once(outages: Outages, redis: Redis) -> None:
    q = queue(redis, lease_ms=300)
    await q.enqueue([spec(f"s{i}", job="j") for i in range(50)])
    claims = await q.claim("w1", plan(20))
    for claim in claims[:10]:
        assert await commit(redis, "w1", claim)
    await outages.safe(redis)
    async with outages.away():
        enqueueing = asyncio.create_task(q.enqueue([spec(f"s{i}", job="j") for i in range(45, 60)]))
    assert await enqueueing == 10, "a call made while it was away waits for it"
    done = set(ids(claims[:10]))

    async def all_done() -> bool:
        for claim in [*await q.claim("w2", plan(60)), *await q.reap("w2", 60)]:
            assert claim.spec.id not in done, "a finished one came again"
            done.add(claim.spec.id)
            assert await commit(redis, "w2", claim)
        return len(done) == 60

    await wait_until(all_done)
    assert sorted(result.id for result in await gathered(redis, "j")) == sorted(f"s{i}" for i in range(60))


async def streams_go_on(outages: Outages, redis: Redis, reader: FrameReader, total: int) -> None:
    """Eight streams of `total` tokens; `reader` is that of api "a". No gap, no repeat."""
    q = queue(redis, lease_ms=60_000)
    seqs = [f"s{i}" for i in range(8)]
    feed = reader.open(MODEL, seqs)
    await q.enqueue([spec(seq, api="a") for seq in seqs])
    claims = await q.claim("w1", plan(8))
    await outages.safe(redis)
    writer = FrameWriter(redis, MODEL, "w1")

    async def write() -> None:
        for position in range(total):
            chunk = {seq: [tokens(seq, position - 15, 16)] for seq in seqs} if position % 16 == 15 else {}
            await writer.write({"a": [tokens(seq, position, 1) for seq in seqs]}, chunk, [])
            while writer.gaps:  # what a new primary never heard of; a worker logs it anew
                seq = writer.gaps.pop()
                await writer.write({}, {seq: [tokens(seq, 0, position + 1)]}, [])
            await asyncio.sleep(0.002)
        last = {seq: stop(seq, total) for seq in seqs}
        commits = [ending(claim, [last[claim.spec.id]]) for claim in claims]
        assert all(await writer.write({"a": list(last.values())}, {}, commits))

    async def strike() -> None:
        async with outages.away():
            pass

    writing = asyncio.create_task(write())
    found: dict[int, list[int]] = {i: [] for i in range(8)}
    striking: asyncio.Task[None] | None = None
    async with asyncio.timeout(HANG_S):
        while not feed.done:
            for index, event in await feed.next():
                found[index] += event.tokens
            if striking is None and len(found[0]) > 60:
                striking = asyncio.create_task(strike())
    await writing
    assert striking is not None, "the streams ended before it struck"
    await striking
    assert all(values == [1000 + i for i in range(total)] for values in found.values())
    assert (await read_tokens(redis, MODEL, "s0", 0))[-1].finish is not None


async def an_idle_worker_wakes(outages: Outages, redis: Redis) -> None:
    q = queue(redis)
    await q.claim("w1", plan(4))
    waiting = asyncio.create_task(q.wait("w1", HANG_S))

    async def it_blocks() -> bool:  # a connection that is only being made is not tried again
        return int((await redis.info("clients"))["blocked_clients"]) > 0

    await wait_until(it_blocks)
    await outages.safe(redis)
    async with outages.away():
        pass
    await q.enqueue([spec("s")])
    assert await asyncio.wait_for(waiting, HANG_S)
    assert ids(await q.claim("w1", plan(4))) == ["s"]
