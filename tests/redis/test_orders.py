import msgspec
import pytest
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import connect
from shared.sequences import Claim, SamplingParams, SequenceSpec
from tests.waiting import wait_until
from worker.control import ControlChannel
from worker.rows import ClaimedRow, ClaimedRows

MODEL = "m"


class Heard:
    """A worker's table of rows, and what the orders did to it."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.rows = ClaimedRows()
        self.cancelled: list[str] = []
        self.flushed: list[str] = []
        self.resets: list[tuple[str, bool]] = []
        self.orders = ControlChannel(
            redis,
            redis,
            MODEL,
            "w",
            self.rows,
            lambda seq, reason: self.cancelled.append(seq),
            self.flushed.append,
            lambda: None,
            lambda order, rows: self.resets.append((order, rows)),
        )

    def api_of(self, seq: str) -> str:
        row = self.rows.get(seq)
        assert row is not None
        return row.api

    def run(self, seq: str, api: str) -> None:
        spec = SequenceSpec(seq, MODEL, (1,), SamplingParams(8, 0), api=api)
        self.rows.add(ClaimedRow.after(Claim(spec, "stream", "0-1", 1), []))


@pytest.fixture
async def heard(redis_url: str):
    redis = connect(redis_url)
    yield Heard(redis)
    await redis.aclose()


async def test_rows_of_a_dead_api_are_cancelled_and_others_are_not(heard: Heard) -> None:
    await heard.redis.hset(keys.api("alive"), "pid", 1)
    await heard.redis.expire(keys.api("alive"), 60)
    heard.run("read", "alive")
    heard.run("orphan", "dead")
    heard.run("unstreamed", "")
    await heard.orders.end_orphans()
    assert heard.cancelled == ["orphan"]


async def test_an_order_that_nobody_heard_is_obeyed_on_rereading(heard: Heard) -> None:
    heard.run("stopped", "a")
    heard.run("moved", "a")
    for seq, field, value in (("stopped", "cancel", "1"), ("moved", "api", "b")):
        await heard.redis.hset(keys.sequence(MODEL, seq), field, value)
        await heard.redis.expire(keys.sequence(MODEL, seq), 60)
    await heard.orders.reread(list(heard.rows))
    assert heard.cancelled == ["stopped"]
    assert heard.api_of("moved") == "b"
    assert heard.flushed == ["moved"]


async def test_garbage_on_the_channel_does_not_stop_the_listener(heard: Heard) -> None:
    import asyncio

    heard.run("row", "a")
    listener = asyncio.create_task(heard.orders.listen())
    channel = keys.control_channel("w")

    async def subscribed() -> bool:
        return (await heard.redis.pubsub_numsub(channel))[0][1] == 1

    await wait_until(subscribed)
    for message in (b"\xc1", msgspec.msgpack.encode(("dance", "row")), msgspec.msgpack.encode(("cancel", "row"))):
        await heard.redis.publish(channel, message)
    await wait_until(lambda: heard.cancelled == ["row"])
    listener.cancel()
    await asyncio.gather(listener, return_exceptions=True)


async def test_an_order_that_came_before_the_claim_is_obeyed_with_it(heard: Heard) -> None:
    heard.orders.obey(msgspec.msgpack.encode(("cancel", "late")))
    heard.orders.obey(msgspec.msgpack.encode(("route", "moved", "b")))
    assert heard.cancelled == []
    for seq in ("late", "moved"):
        heard.run(seq, "a")
        heard.orders.welcome(seq)
    assert heard.cancelled == ["late"]
    assert heard.api_of("moved") == "b"


async def test_an_order_given_while_the_connection_was_down_is_obeyed(heard: Heard) -> None:
    """redis-py connects and subscribes again by itself; what was said in between stands in the sequence's hash."""
    import asyncio

    listener = asyncio.create_task(heard.orders.listen())
    channel = keys.control_channel("w")

    async def subscribed() -> bool:
        return (await heard.redis.pubsub_numsub(channel))[0][1] == 1

    await wait_until(subscribed)
    heard.run("stopped", "a")
    await heard.redis.hset(keys.sequence(MODEL, "stopped"), "cancel", "1")
    await heard.redis.expire(keys.sequence(MODEL, "stopped"), 60)
    await heard.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    await wait_until(lambda: heard.cancelled == ["stopped"])
    listener.cancel()
    await asyncio.gather(listener, return_exceptions=True)


async def test_an_order_to_forget_cached_kv_is_passed_on(heard: Heard) -> None:
    heard.orders.obey(msgspec.msgpack.encode(("reset-cache", "a", "")))
    heard.orders.obey(msgspec.msgpack.encode(("reset-cache", "b", "rows")))
    assert heard.resets == [("a", False), ("b", True)]
