"""Redis is killed with SIGKILL in the middle of everything and started again on the same data and port."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from shared.frames import TokenEvent
from shared.redis.client import connect
from shared.redis.embedded import EmbeddedRedis
from shared.redis.token_frames import FrameReader, FrameWriter, read_tokens
from tests.redis.sequences import MODEL, commit, ending, gathered, ids, plan, queue, spec, stop, tokens
from tests.waiting import wait_until


class Restartable:
    """A server of this test's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.server = EmbeddedRedis(folder)
        self.url = self.server.start()

    async def kill(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        await wait_until(lambda: not self.server.alive)
        self.server.stop()

    async def start(self) -> None:
        self.server = EmbeddedRedis(self._folder, port=self.server.port)
        await asyncio.to_thread(self.server.start)


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[Restartable]:
    made = Restartable(tmp_path)
    yield made
    made.server.stop()


@pytest.fixture
async def redis(own: Restartable) -> AsyncIterator[Redis]:
    client = connect(own.url)
    yield client
    await client.aclose()


async def fsynced(redis: Redis) -> None:
    """Wait until what has been acknowledged is on disk: WAITAOF (Redis 7.2, Valkey) says when."""
    assert (await redis.execute_command("WAITAOF", 1, 0, 5000))[0] == 1


async def test_no_acknowledged_sequence_is_lost(own: Restartable, redis: Redis) -> None:
    q = queue(redis, lease_ms=300)
    await q.enqueue([spec(f"s{i}", job="j") for i in range(50)])
    claims = await q.claim("w1", plan(20))
    for claim in claims[:10]:
        assert await commit(redis, "w1", claim)
    await fsynced(redis)
    await own.kill()
    enqueueing = asyncio.create_task(q.enqueue([spec(f"s{i}", job="j") for i in range(45, 60)]))
    await own.start()
    assert await enqueueing == 10, "a call made while it was down waits for it"
    done = set(ids(claims[:10]))

    async def all_done() -> bool:
        for claim in [*await q.claim("w2", plan(60)), *await q.reap("w2", 60)]:
            assert claim.spec.id not in done, "a finished one came again"
            done.add(claim.spec.id)
            assert await commit(redis, "w2", claim)
        return len(done) == 60

    await wait_until(all_done, 20)
    assert sorted(result.id for result in await gathered(redis, "j")) == sorted(f"s{i}" for i in range(60))


async def test_streams_go_on_without_gap_or_repeat(own: Restartable, redis: Redis) -> None:
    q = queue(redis, lease_ms=10_000)
    reader = FrameReader(own.url, "a")
    await reader.start()
    seqs = [f"s{i}" for i in range(8)]
    feed = reader.open(MODEL, seqs)
    await q.enqueue([spec(seq, api="a") for seq in seqs])
    claims = await q.claim("w1", plan(8))
    await fsynced(redis)
    writer, total = FrameWriter(redis, MODEL, "w1"), 400

    async def write() -> None:
        for position in range(total):
            chunk = {seq: [tokens(seq, position - 15, 16)] for seq in seqs} if position % 16 == 15 else {}
            await writer.write({"a": [tokens(seq, position, 1) for seq in seqs]}, chunk, [])
            await asyncio.sleep(0.002)
        last = {seq: stop(seq, total) for seq in seqs}
        commits = [ending(claim, [last[claim.spec.id]]) for claim in claims]
        assert all(await writer.write({"a": list(last.values())}, {}, commits))

    writing = asyncio.create_task(write())
    found: dict[int, list[TokenEvent]] = {i: [] for i in range(8)}
    killed = False
    async with asyncio.timeout(60):
        while not feed.done:
            for index, event in await feed.next():
                found[index].append(event)
            if not killed and len(found[0]) > 60:
                killed = True
                await own.kill()
                await own.start()
    await writing
    await reader.stop()
    for events in found.values():
        assert [token for event in events for token in event.tokens] == [1000 + i for i in range(total)]
    assert (await read_tokens(redis, MODEL, "s0", 0))[-1].finish is not None


async def test_an_idle_worker_wakes_after_a_restart(own: Restartable, redis: Redis) -> None:
    q = queue(redis)
    await q.claim("w1", plan(4))
    waiting = asyncio.create_task(q.wait("w1", 20))
    await own.kill()
    await own.start()
    await q.enqueue([spec("s")])
    assert await asyncio.wait_for(waiting, 20)
    assert ids(await q.claim("w1", plan(4))) == ["s"]
