"""A stopped owner wakes and goes on writing frames: no reader sees its tokens beside those of the new owner."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from shared.frames import TokenEvent
from shared.redis import keys
from shared.redis.tokens.log import read_tokens
from shared.redis.tokens.reader import FrameReader
from shared.redis.tokens.writer import FrameWriter
from tests.redis.sequences import MODEL, ending, plan, queue, spec, stop, tokens
from tests.redis.test_frames import read_to_the_end, values


@pytest.fixture
async def reader(redis_url: str) -> AsyncIterator[FrameReader]:
    made = FrameReader(redis_url, "a")
    await made.start()
    yield made
    await made.stop()


async def taken_over(redis: Redis, seq: str) -> list[TokenEvent]:
    """Attempt 2 begins as a worker begins it: the fence, then the tokens that are there."""
    await FrameWriter(redis, MODEL, "new").fence({"a": {seq: 2}})
    return await read_tokens(redis, MODEL, seq, 0, "a")


async def test_a_frame_behind_the_fence_is_seen_by_no_reader(redis: Redis, reader: FrameReader) -> None:
    feed = reader.open(MODEL, ["s"])
    old, new = FrameWriter(redis, MODEL, "old"), FrameWriter(redis, MODEL, "new")
    await old.write({"a": [tokens("s", 0, 2)]}, {}, [])
    prior = await taken_over(redis, "s")
    assert values(prior) == [1000, 1001]
    await old.write({"a": [tokens("s", 2, 5)]}, {}, [])  # before the new owner has said a word
    assert values(await read_tokens(redis, MODEL, "s", 0, "a")) == [1000, 1001], "nor by one that comes later"
    await new.write({"a": [tokens("s", 2, 1, attempt=2), stop("s", 3, attempt=2)]}, {}, [])
    assert values((await read_to_the_end(feed))[0]) == [1000, 1001, 2002]


async def test_an_early_end_behind_the_fence_is_not_lost_to_a_zombie_that_went_further(
    redis: Redis, reader: FrameReader
) -> None:
    """Frames of the old owner beyond the new one's finish would leave the reader waiting for ever."""
    feed = reader.open(MODEL, ["s"])
    q = queue(redis)
    await q.enqueue([spec("s", api="a")])
    (claim,) = await q.claim("old", plan(1))
    old = FrameWriter(redis, MODEL, "old")
    await old.write({"a": [tokens("s", 0, 2)]}, {}, [])
    await q.release("old", [claim])
    assert await q.cancel(["s"]) == {"s": "queued"}
    await old.write({"a": [tokens("s", 2, 5)]}, {}, [ending(claim, [stop("s", 7)], "old")])
    found = (await read_to_the_end(feed))[0]
    assert values(found) == [1000, 1001]
    assert found[-1].finish is not None and found[-1].finish.reason == "cancelled"


async def test_what_a_reader_missed_before_the_fence_comes_from_the_new_owners_log(
    redis: Redis, reader: FrameReader
) -> None:
    feed = reader.open(MODEL, ["s"])
    q = queue(redis)
    await q.enqueue([spec("s", api="a")])
    (claim,) = await q.claim("old", plan(1))
    await FrameWriter(redis, MODEL, "old").write({"elsewhere": [tokens("s", 0, 3)]}, {}, [])
    await q.release("old", [claim])
    (claim,) = await q.claim("new", plan(1))
    await taken_over(redis, "s")
    new = FrameWriter(redis, MODEL, "new")
    prior = tokens("s", 0, 3)
    prior.attempt = 2
    live = [tokens("s", 3, 1, attempt=2), stop("s", 4, attempt=2)]
    await new.write({"a": live}, {"s": [prior]}, [])
    assert values((await read_to_the_end(feed))[0]) == [1000, 1001, 1002, 2003]


async def test_a_resumed_reader_knows_whose_tokens_it_has(redis: Redis, reader: FrameReader) -> None:
    feed = reader.open(MODEL, ["s"], [2], [2])
    await FrameWriter(redis, MODEL, "old").write({"a": [tokens("s", 2, 4)]}, {}, [])
    new = [tokens("s", 2, 1, attempt=2), stop("s", 3, attempt=2)]
    await FrameWriter(redis, MODEL, "new").write({"a": new}, {}, [])
    assert values((await read_to_the_end(feed))[0]) == [2002]
    assert await redis.ttl(keys.frames("a")) > 0
