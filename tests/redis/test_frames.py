"""Token frames from the worker's writes to the api's feeds."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from shared.frames import Finish, Frame, TokenEvent, encode_frame
from shared.redis import keys
from shared.redis.tokens import feed as token_feed
from shared.redis.tokens.feed import TokenFeed
from shared.redis.tokens.log import read_tokens
from shared.redis.tokens.reader import FrameReader
from shared.redis.tokens.writer import FrameWriter
from tests.redis.sequences import MODEL, ending, ids, plan, queue, spec, specs, state, stop, tokens
from tests.waiting import HANG_S, NEVER_S, wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def reader(redis_url: str) -> AsyncIterator[FrameReader]:
    made = FrameReader(redis_url, "a")
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def writer(redis: Redis) -> FrameWriter:
    return FrameWriter(redis, MODEL, "w1")


async def read_to_the_end(feed: TokenFeed) -> dict[int, list[TokenEvent]]:
    """All events by sequence, checked: consecutive from the first one, and one finish at the end."""
    found: dict[int, list[TokenEvent]] = {}
    async with asyncio.timeout(HANG_S):
        while not feed.done:
            for index, event in await feed.next():
                so_far = found.setdefault(index, [])
                assert not so_far or so_far[-1].end == event.position
                so_far.append(event)
    for events in found.values():
        assert [event.finish is not None for event in events] == [False] * (len(events) - 1) + [True]
    return found


def values(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.tokens]


async def run(redis: Redis, *seqs: str, api: str = "a") -> None:
    """Make these sequences run on w1, so that their logs can be written."""
    q = queue(redis)
    await q.enqueue([spec(seq, api=api) for seq in seqs])
    assert set(ids(await q.claim("w1", plan(len(seqs))))) == set(seqs)


@pytest.mark.cluster
async def test_tokens_arrive_in_order_until_the_finish(reader: FrameReader, writer: FrameWriter) -> None:
    with_finish = tokens("s", 5, 1, finish=Finish("length"))
    feed = reader.open(MODEL, ["s"])
    for event in [*(tokens("s", i, 1) for i in range(5)), with_finish]:
        await writer.write({"a": [event]}, {}, [])
    found = await read_to_the_end(feed)
    assert values(found[0]) == [1000 + i for i in range(6)]
    assert await feed.next() == []
    feed.close()
    assert reader.streams == 0


async def test_one_reader_serves_many_feeds(reader: FrameReader, writer: FrameWriter) -> None:
    feeds = [reader.open(MODEL, [f"{i}-0", f"{i}-1"]) for i in range(50)]
    for position in range(4):
        finish = Finish("stop") if position == 3 else None
        events = [tokens(f"{i}-{n}", position, 1, finish=finish) for i in range(50) for n in range(2)]
        await writer.write({"a": events, "other": events}, {}, [])
    for feed in feeds:
        found = await read_to_the_end(feed)
        assert sorted(found) == [0, 1]
        assert values(found[0]) == values(found[1]) == [1000, 1001, 1002, 1003]
        feed.close()


async def test_two_feeds_may_read_one_sequence(reader: FrameReader, writer: FrameWriter) -> None:
    with closing(reader.open(MODEL, ["s"])) as first, closing(reader.open(MODEL, ["s"])) as second:
        await writer.write({"a": [tokens("s", 0, 2), stop("s", 2)]}, {}, [])
        assert values((await read_to_the_end(first))[0]) == values((await read_to_the_end(second))[0]) == [1000, 1001]


async def test_prompt_logprobs_alone_arrive_once(reader: FrameReader, writer: FrameWriter) -> None:
    feed = reader.open(MODEL, ["s"])
    bare = TokenEvent("s", 1, 0, [], [], prompt_logprobs=[None, -0.5])
    await writer.write({"a": [bare]}, {}, [])
    await writer.write({"a": [bare]}, {}, [])
    await writer.write({"a": [tokens("s", 0, 1), bare, stop("s", 1)]}, {}, [])
    found = await read_to_the_end(feed)
    assert [event.prompt_logprobs for event in found[0]] == [[None, -0.5], None, None]


async def test_repeats_and_overlaps_are_dropped(reader: FrameReader, writer: FrameWriter) -> None:
    feed = reader.open(MODEL, ["s"])
    events = [tokens("s", 0, 3), tokens("s", 0, 3), tokens("s", 2, 3), tokens("s", 4, 1), stop("s", 5), stop("s", 5)]
    for event in events:
        await writer.write({"a": [event]}, {}, [])
    found = await read_to_the_end(feed)
    assert values(found[0]) == [1000, 1001, 1002, 1003, 1004]


async def test_stale_attempts_are_dropped(reader: FrameReader, writer: FrameWriter) -> None:
    feed = reader.open(MODEL, ["s"])
    await writer.write({"a": [tokens("s", 0, 2), tokens("s", 2, 2, attempt=2)]}, {}, [])
    await writer.write({"a": [tokens("s", 4, 2), stop("s", 6, attempt=1)]}, {}, [])
    await writer.write({"a": [tokens("s", 4, 1, attempt=2), stop("s", 5, attempt=2)]}, {}, [])
    found = await read_to_the_end(feed)
    assert values(found[0]) == [1000, 1001, 2002, 2003, 2004]


@pytest.fixture
def silent_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is no reason to ask the log: what comes of itself comes, and the rest never does."""
    monkeypatch.setattr(token_feed, "SILENCE_S", NEVER_S)


@pytest.mark.usefixtures("silent_for_ever")
async def test_a_gap_is_filled_from_the_frame_stream(redis: Redis, reader: FrameReader, writer: FrameWriter) -> None:
    """A frame that was written and never published, as after a reader's buffer was cut off."""
    feed = reader.open(MODEL, ["s"])
    await writer.write({"a": [tokens("s", 0, 1)]}, {}, [])
    lost = encode_frame(Frame("w1", 0, [tokens("s", 1, 1)]))
    await redis.xadd(keys.frames("a"), {"d": lost})
    await writer.write({"a": [tokens("s", 2, 1), stop("s", 3)]}, {}, [])
    found = await read_to_the_end(feed)
    assert values(found[0]) == [1000, 1001, 1002], "at once, not after a second of silence"


@pytest.mark.usefixtures("silent_for_ever")
@pytest.mark.cluster
async def test_a_gap_is_filled_from_the_log(redis: Redis, reader: FrameReader, writer: FrameWriter) -> None:
    await run(redis, "s")
    feed = reader.open(MODEL, ["s"])
    await writer.write({}, {"s": [tokens("s", 0, 4)]}, [])
    await writer.write({"a": [tokens("s", 4, 1), stop("s", 5)]}, {}, [])
    found = await read_to_the_end(feed)
    assert values(found[0]) == [1000, 1001, 1002, 1003, 1004]


async def test_a_gap_is_asked_for_until_the_log_has_it(redis: Redis, reader: FrameReader, writer: FrameWriter) -> None:
    """As after a change of route: the new api gets frames before the worker has written the tokens before them."""
    await run(redis, "s")
    feed = reader.open(MODEL, ["s"])
    await writer.write({"a": [tokens("s", 4, 1)]}, {}, [])
    reading = asyncio.create_task(read_to_the_end(feed))
    await wait_until(lambda: feed.cursors[0].pause_s >= 0.2)
    await writer.write({}, {"s": [tokens("s", 0, 4)]}, [])
    await writer.write({"a": [tokens("s", 5, 1), stop("s", 6)]}, {}, [])
    assert values((await reading)[0]) == [1000 + i for i in range(6)]


async def test_after_a_second_of_silence_the_log_is_asked(
    redis: Redis, reader: FrameReader, writer: FrameWriter
) -> None:
    await run(redis, "s")
    feed = reader.open(MODEL, ["s"])
    await writer.write({}, {"s": [tokens("s", 0, 4), stop("s", 4)]}, [])
    found = await read_to_the_end(feed)
    assert values(found[0]) == [1000, 1001, 1002, 1003]


@pytest.mark.usefixtures("silent_for_ever")
async def test_a_feed_from_the_middle_begins_with_the_log(
    redis: Redis, reader: FrameReader, writer: FrameWriter
) -> None:
    await run(redis, "s", "t")
    await writer.write({}, {"s": [tokens("s", 0, 8)], "t": [tokens("t", 0, 2)]}, [])
    feed = reader.open(MODEL, ["s", "t"], [3, 0])
    reading = asyncio.create_task(read_to_the_end(feed))
    await wait_until(lambda: feed.cursors[0].position == 8)
    await writer.write({"a": [stop("s", 8), stop("t", 2)]}, {}, [])
    found = await reading
    assert found[0][0].position == 3
    assert values(found[0]) == [1003, 1004, 1005, 1006, 1007]
    assert values(found[1]) == [1000, 1001]


async def test_a_slow_reader_holds_a_bounded_number_of_events_and_loses_none(
    redis: Redis, reader: FrameReader, writer: FrameWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_feed, "EVENTS_HELD", 20)
    await run(redis, "s")
    feed = reader.open(MODEL, ["s"])
    for position in range(0, 400, 4):
        events = [tokens("s", position + i, 1) for i in range(4)]
        for event in events:
            await writer.write({"a": [event]}, {}, [])
        await writer.write({}, {"s": events}, [])
    await wait_until(lambda: feed.overrun)
    assert len(feed.ready) == 20
    await writer.write({"a": [stop("s", 400)]}, {"s": [stop("s", 400)]}, [])
    found = await read_to_the_end(feed)
    assert values(found[0]) == [1000 + i for i in range(400)]


async def test_a_lost_subscription_is_made_again_and_what_it_missed_is_read(
    redis: Redis, reader: FrameReader, writer: FrameWriter
) -> None:
    feed = reader.open(MODEL, ["s"])
    reading = asyncio.create_task(read_to_the_end(feed))
    for position in range(300):
        if position % 50 == 25:
            await redis.client_kill_filter(_type="pubsub")
        await writer.write({"a": [tokens("s", position, 1)]}, {}, [])
    await redis.client_kill_filter(_type="pubsub")
    await writer.write({"a": [stop("s", 300)]}, {}, [])
    assert values((await reading)[0]) == [1000 + i for i in range(300)]


FROZEN_READER = """
import asyncio, contextlib, sys
from shared.redis.tokens.reader import FrameReader

async def main(url):
    reader = FrameReader(url, "frozen")
    await reader.start()
    count = 0
    with contextlib.closing(reader.open("m", ["s"])) as feed:
        print("ready", flush=True)
        while not feed.done:
            for _, event in await feed.next():
                count += len(event.tokens)
            print(count, flush=True)
    print("end", count, flush=True)
    await reader.stop()

asyncio.run(main(sys.argv[1]))
"""


async def test_a_reader_frozen_while_its_stream_runs_over_gets_every_token(
    redis: Redis, redis_url: str, writer: FrameWriter
) -> None:
    """6,000 frames of 3 kB in the meantime: the frame stream keeps 4,096, and the rest stands in the log."""
    await run(redis, "s", api="frozen")
    ballast = [tokens("other", 0, 250)]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FROZEN_READER, redis_url, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert child.stdout is not None
    assert await child.stdout.readline() == b"ready\n"
    await writer.write({"frozen": [tokens("s", 0, 1)]}, {"s": [tokens("s", 0, 1)]}, [])
    assert await child.stdout.readline() == b"1\n"
    os.kill(child.pid, signal.SIGSTOP)
    total = 6_001
    chunk: list[TokenEvent] = []
    for position in range(1, total):
        event = tokens("s", position, 1)
        chunk.append(event)
        flush = len(chunk) == 16 or position == total - 1
        await writer.write({"frozen": [event, *ballast]}, {"s": chunk} if flush else {}, [])
        if flush:
            chunk = []
    os.kill(child.pid, signal.SIGCONT)
    await writer.write({"frozen": [stop("s", total)]}, {"s": [stop("s", total)]}, [])
    out, _ = await asyncio.wait_for(child.communicate(), HANG_S)
    assert out.split(b"\n")[-2] == b"end %d" % total


@pytest.mark.cluster
async def test_whoever_hears_of_an_end_finds_it_committed(
    redis: Redis, reader: FrameReader, writer: FrameWriter
) -> None:
    q = queue(redis)
    await q.enqueue(specs("s", 20))
    claims = await q.claim("w1", plan(20))
    feed = reader.open(MODEL, ids(claims))
    commits = [ending(claim, [stop(claim.spec.id)]) for claim in claims]
    writing = asyncio.create_task(writer.write({"a": [stop(seq) for seq in ids(claims)]}, {}, commits))
    while not feed.done:
        for _, event in await feed.next():
            assert await state(redis, event.seq) == "done"
    assert await writing == [True] * 20


async def test_a_write_survives_a_restart_that_forgot_the_scripts(redis: Redis, writer: FrameWriter) -> None:
    await run(redis, "s")
    await redis.script_flush()
    q = queue(redis)
    await q.enqueue([spec("t", job="j")])
    (claim,) = await q.claim("w1", plan(1))
    await redis.script_flush()
    commits = [ending(claim, [stop("t")])]
    assert await writer.write({"a": [tokens("s", 0, 1)]}, {"s": [tokens("s", 0, 1)]}, commits) == [True]
    assert len(await redis.xrange(keys.finished(MODEL, "j"))) == 1
    assert values(await read_tokens(redis, MODEL, "s", 0)) == [1000]


async def test_what_the_log_lacks_is_read_from_the_frames_of_its_api(redis: Redis, writer: FrameWriter) -> None:
    await run(redis, "s")
    await writer.write({"a": [tokens("s", 0, 2)]}, {"s": [tokens("s", 0, 2)]}, [])
    await writer.write({"a": [tokens("s", 2, 1), tokens("other", 0, 1)]}, {}, [])
    await writer.write({"a": [tokens("s", 4, 1)]}, {}, [])
    assert values(await read_tokens(redis, MODEL, "s", 0)) == [1000, 1001]
    assert values(await read_tokens(redis, MODEL, "s", 1, "a")) == [1001, 1002], "up to the gap"
    assert await read_tokens(redis, MODEL, "s", 9, "a") == []
    assert await read_tokens(redis, MODEL, "unknown", 0, "a") == []


async def test_an_unreadable_frame_stops_nobody(redis: Redis, reader: FrameReader, writer: FrameWriter) -> None:
    feed = reader.open(MODEL, ["s"])
    await redis.publish(keys.frame_channel("a"), b"\xc1 not msgpack")
    await writer.write({"a": [tokens("s", 0, 1), stop("s", 1)]}, {}, [])
    assert values((await read_to_the_end(feed))[0]) == [1000]


async def test_an_api_says_that_it_lives(redis: Redis, reader: FrameReader) -> None:
    async def beaten() -> bool:
        return bool(await redis.exists(keys.api("a")))

    await wait_until(beaten)
    assert int(await redis.hget(keys.api("a"), "pid")) == os.getpid()
    await reader.stop()
    assert 0 < await redis.ttl(keys.api("a")) <= keys.API_LEFT_S, "its streams wait for their clients"


@pytest.mark.parametrize("reason", ["cancelled", "error", "stop"])
async def test_an_end_before_what_the_reader_has_is_an_end(
    reader: FrameReader, writer: FrameWriter, reason: Any
) -> None:
    """Redis was emptied, the sequence began anew and ended at once: nothing more will ever come."""
    feed = reader.open(MODEL, ["s"])
    await writer.write({"a": [tokens("s", 0, 20)]}, {}, [])
    await writer.write({"a": [tokens("s", 0, 5, finish=Finish(reason, error_code="engine_error"))]}, {}, [])
    found = await read_to_the_end(feed)
    assert len(values(found[0])) == 20
    finish = found[0][-1].finish
    assert finish is not None
    if reason == "stop":  # it said less than its reader has: its answer is not the same one
        assert (finish.reason, finish.error_code) == ("error", "service_unavailable")
        assert "send it again" in finish.error_message
    else:
        assert finish.reason == reason
