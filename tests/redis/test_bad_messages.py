"""Garbage straight in the Redis streams: it is taken out and kept, and what stands behind it goes on."""

from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from shared import sequences as messages
from shared.errors import IncompatibleVersionError, UnreadableMessageError
from shared.frames import Finish, Frame, TokenEvent, decode_frame, encode_frame
from shared.redis import keys
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.redis.queue.dead_letters import DeadLetters
from shared.redis.tokens.reader import FrameReader
from shared.redis.tokens.writer import FrameWriter
from shared.sequences import SequenceResult, decode_result, decode_spec, encode
from tests.redis.sequences import MODEL, ids, plan, queue, spec, state, stop, tokens
from tests.redis.test_frames import read_to_the_end, values

STREAM = keys.queue(MODEL, "interactive")


async def letters(redis: Redis) -> list[str]:
    return [letter.reason for letter in await DeadLetters(redis).list(MODEL)]


@pytest.mark.parametrize(
    "fields",
    [
        {"nonsense": "1"},
        {"id": ""},
        {"id": b"\xff\xfe", "kv": "x"},
        {"id": "nobody", "group": "g", "kv": "-5"},
        {"id": "a string", "kv": "nan"},
        {"id": "x" * 100_000, "kv": "inf"},
    ],
)
async def test_an_entry_without_a_sequence_is_buried_and_the_next_one_runs(
    redis: Redis, fields: dict[str, Any]
) -> None:
    q = queue(redis)
    await q.enqueue([spec("before")])
    await redis.set(keys.sequence(MODEL, "a string"), "not a hash", ex=60)
    await redis.xadd(STREAM, fields)
    await q.enqueue([spec("behind")])
    assert ids(await q.claim("w", plan(8))) == ["before", "behind"]
    assert await letters(redis) == ["no such sequence"]
    assert await redis.xlen(STREAM) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"spec": b"\xc1 garbage"},
        {"spec": b""},
        {"spec": msgspec.msgpack.encode({"id": "s", "model": MODEL})},
        {"spec": msgspec.msgpack.encode([1] * 1000)},
        {"spec": b"\x91" * 100_000},
        {"spec": msgspec.msgpack.encode({**msgspec.to_builtins(spec("s")), "prompt_ids": "text"})},
        {"attempt": "many", "spec": b"garbage"},
        {"deadline": "tomorrow", "spec": b"garbage"},
        {"deaths": "x", "spec": b"garbage"},
    ],
)
async def test_a_spec_that_nobody_can_read_ends_its_sequence_as_an_error(redis: Redis, change: dict[str, Any]) -> None:
    q = queue(redis)
    await q.enqueue([spec("s", job="j"), spec("behind")])
    await redis.hset(keys.sequence(MODEL, "s"), mapping=change)
    assert ids(await q.claim("w", plan(8))) == ["behind"]
    assert await state(redis, "s") == "done"
    ((_, fields),) = await redis.xrange(keys.finished(MODEL, "j"))
    assert decode_result(fields[b"result"]).finish.error_code == "unreadable_message"
    (reason,) = await letters(redis)
    assert "unreadable" in reason


@pytest.mark.parametrize("field", ["api", "job"])
async def test_names_that_are_no_text_are_buried(redis: Redis, field: str) -> None:
    q = queue(redis)
    await q.enqueue([spec("s"), spec("behind")])
    await redis.hset(keys.sequence(MODEL, "s"), field, b"\xff\xfe")
    assert ids(await q.claim("w", plan(8))) == ["behind"]
    (reason,) = await letters(redis)
    assert "unreadable" in reason
    assert await redis.xlen(STREAM) == 1


async def test_the_reaper_passes_what_is_no_sequence(redis: Redis) -> None:
    q = queue(redis, lease_ms=1)
    await q.enqueue([spec("gone"), spec("changed"), spec("good")])
    assert len(await q.claim("dead", plan(8))) == 3
    await redis.delete(keys.sequence(MODEL, "gone"), keys.sequence(MODEL, "changed"))
    await redis.set(keys.sequence(MODEL, "changed"), "not a hash", ex=60)
    assert ids(await queue(redis, lease_ms=0).reap("w", 8)) == ["good"]
    assert await redis.xlen(STREAM) == 0


@pytest.mark.parametrize("version", [0, -1, 4, 2**40])
async def test_another_versions_spec_is_refused_by_name(redis: Redis, version: int) -> None:
    fields = {**msgspec.to_builtins(spec("s")), "schema": version, "prompt_ids": "a type of tomorrow"}
    for data in (fields, {**fields, "prompt_ids": (1, 2)}):
        with pytest.raises(IncompatibleVersionError, match=f"schema {version} and this process reads 1 to 3"):
            decode_spec(msgspec.msgpack.encode(data))


def test_only_a_worker_that_knows_of_it_takes_what_is_not_to_be_cached() -> None:
    private = decode_spec(encode(msgspec.structs.replace(spec("s"), cache=False)))
    assert (private.cache, private.schema) == (False, 3)
    assert decode_spec(encode(spec("s"))).schema == 1


def test_fields_that_were_added_are_left_out_and_those_of_sampling_are_refused() -> None:
    fields = msgspec.to_builtins(spec("s"))
    assert decode_spec(msgspec.msgpack.encode({**fields, "added": {"a": [1]}})) == spec("s")
    newer = {**fields, "sampling": {**fields["sampling"], "added": 1}}
    with pytest.raises(UnreadableMessageError, match="added"):
        decode_spec(msgspec.msgpack.encode(newer))
    event = TokenEvent("s", 1, 0, [5], [-0.5])
    frame = msgspec.msgpack.encode(["w", 1, [[*msgspec.to_builtins(event), "added"]], 1, "added"])
    assert decode_frame(frame).events == [event]


def test_a_message_says_its_version_as_soon_as_it_is_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(messages, "SCHEMA", 4)
        newer.setattr(messages, "PLAIN", 4)
        packed = encode(spec("s"))
        assert decode_spec(packed).schema == 4
        assert decode_spec(messages._encoder.encode(spec("s"))).schema == 1, "an older process's"
        result = encode(SequenceResult("s", Finish("stop"), "w", 1, 2))
    for data, decode in ((packed, decode_spec), (result, decode_result)):
        with pytest.raises(IncompatibleVersionError, match="schema 4"):
            decode(data)


BAD_FRAMES = [
    b"",
    b"\xc1",
    msgspec.msgpack.encode({"worker": "w"}),
    msgspec.msgpack.encode(["w", 1, "events", 1]),
    b"\x91" * 100_000,
    encode_frame(Frame("w", 0, [tokens("s", 0, 1)], schema=2)),
    encode_frame(Frame("w", 0, [TokenEvent("s", 1, -3, [1], [-0.5])])),
    encode_frame(Frame("w", 0, [TokenEvent("s", 1, 0, [1, 2], [-0.5])])),
    encode_frame(Frame("w", 0, [TokenEvent("s", 0, 0, [1], [-0.5])])),
]


async def test_frames_that_nobody_can_read_stop_no_stream(redis: Redis, redis_url: str) -> None:
    reader = FrameReader(redis_url, "a")
    await reader.start()
    try:
        feed = reader.open(MODEL, ["s"])
        await redis.xadd(keys.frames("a"), {"other": b"1"})
        await redis.xadd(keys.sequence_log(MODEL, "s"), {"other": b"1"})
        await redis.xadd(keys.sequence_log(MODEL, "s"), {"d": b"\xc1"})
        await redis.expire(keys.sequence_log(MODEL, "s"), 60)
        for data in BAD_FRAMES:
            await redis.xadd(keys.frames("a"), {"d": data})
            await redis.publish(keys.frame_channel("a"), data)
        writer = FrameWriter(redis, MODEL, "w")
        await redis.xadd(keys.frames("a"), {"d": encode_frame(Frame("w", 0, [tokens("s", 0, 1)]))})  # never published
        await writer.write({"a": [tokens("s", 1, 1), stop("s", 2)]}, {}, [])
        assert values((await read_to_the_end(feed))[0]) == [1000, 1001]
    finally:
        await reader.stop()


async def test_a_registry_with_garbage_in_it_gives_what_can_be_read(redis: Redis) -> None:
    registry = WorkerRegistry(redis)
    names = {keys.workers(MODEL): ["w", b"\xff"], keys.models(): [MODEL, b"\xfe"]}
    for index, members in names.items():
        await redis.zadd(index, dict.fromkeys(members, 2**41))
    await redis.hset(keys.worker(MODEL, "w"), mapping={"id": b"\xff", "rows": "many", "adapters": "{"})
    await redis.set(keys.model_card(MODEL), b"{not json")
    for key in (*names, keys.worker(MODEL, "w"), keys.model_card(MODEL)):
        await redis.expire(key, 60)
    assert await registry.workers(MODEL) == []
    assert await registry.models() == []
    assert await registry.live_models() == set()
