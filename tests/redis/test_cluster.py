"""A real Redis Cluster of three shards: our client on it, and what a failover of a shard does to it."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import pytest
import redis as sync_redis
from redis.asyncio import Redis
from redis.exceptions import WatchError

from shared.errors import ServiceUnavailableError, SetupError
from shared.redis.connection.client import Script, ask_all, connect, infos, require
from shared.redis.connection.cluster import ClusterRedis
from shared.redis.connection.routing import slot_of
from shared.redis.jobs.ticks import arq_redis, enqueue_tick
from tests.redis.clusters import SHARDS, Cluster
from tests.waiting import HANG_S, wait_until

KEYS = [f"parallm:{{{name}}}:model" for name in "abcdefgh"]  # in all three shards


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("shards"), replicas=True, password="s3cret")
    yield made
    made.stop()


@pytest.fixture
async def redis(cluster: Cluster) -> AsyncIterator[Redis]:
    await asyncio.to_thread(cluster.wipe)
    async with aclosing(connect(cluster.url)) as client:
        yield client


async def test_commands_and_pipelines_find_their_shards(cluster: Cluster, redis: Redis) -> None:
    assert len({cluster.primary_of(key).port for key in KEYS}) == SHARDS
    await ask_all(redis, [("SET", key, number, "EX", 60) for number, key in enumerate(KEYS)])
    numbers = [b"%d" % number for number in range(len(KEYS))]
    assert await redis.mget(KEYS) == numbers and await redis.exists(*KEYS) == len(KEYS)
    async with redis.pipeline(transaction=True) as pipe:
        for key in KEYS:
            pipe.incrby(key, 10)
            pipe.getdel(key)
        assert (await pipe.execute())[1::2] == [b"%d" % (10 + number) for number in range(len(KEYS))]
    assert await redis.delete(*KEYS) == 0
    assert [info["keys"] for info in await infos(redis)] == [0] * SHARDS


async def test_an_error_of_one_command_says_which_and_no_more(redis: Redis) -> None:
    await redis.set(KEYS[1], "secret", ex=60)
    async with redis.pipeline(transaction=False) as pipe:
        for key in KEYS:
            pipe.hget(key, "field")
        answers = await pipe.execute(raise_on_error=False)
    assert [number for number, answer in enumerate(answers) if isinstance(answer, Exception)] == [1]
    assert KEYS[1] not in str(answers[1]) and "WRONGTYPE" in str(answers[1])


async def test_a_script_that_a_shard_does_not_know_is_loaded_there(redis: Redis) -> None:
    cancel = Script("job_cancel")
    for key in KEYS:
        assert await cancel(redis, [key], []) == b""


async def test_a_read_of_several_slots_ends_with_the_first_that_has_something(redis: Redis) -> None:
    async with aclosing(connect_blocking(redis)) as blocking:
        reading = asyncio.create_task(blocking.xread(dict.fromkeys(KEYS, "$"), count=1, block=20_000))
        await wait_until(lambda: all_wait(redis))
        await redis.xadd(KEYS[3], {"field": 1})
        await redis.expire(KEYS[3], 60)
        assert [name.decode() for name, _ in await reading] == [KEYS[3]]
        assert await blocking.xread(dict.fromkeys(KEYS, "$"), count=1, block=20) == []


async def test_a_tick_is_enqueued_once_and_its_keys_share_a_slot(cluster: Cluster, redis: Redis) -> None:
    assert await enqueue_tick(redis, "j", 1) and not await enqueue_tick(redis, "j", 1)
    assert [job.args for job in await arq_redis(redis).queued_jobs()] == [["j", 1]]
    assert len({slot_of(key) for key in cluster.all_keys()}) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_commands_and_subscriptions_follow_a_failover(
    cluster: Cluster, redis: Redis, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.redis.connection.client.ANSWER_OF_PRIMARY_S", 1.0)
    key, channel = "parallm:{a}:model", "parallm:api:{a}:live"
    async with aclosing(connect(cluster.url)) as other, redis.pubsub() as subscription:
        await subscription.subscribe(channel)
        assert (await subscription.get_message(timeout=HANG_S))["type"] == "subscribe"
        await redis.set(key, 1, ex=600)
        await cluster.until(cluster.in_step)
        async with cluster.away(key, how) as old:
            async with aclosing(connect(cluster.url)) as client:
                assert await client.incr(key) == 2
            pipe = other.pipeline(transaction=False)
            for each in KEYS:
                pipe.incr(each)
                pipe.expire(each, 600)
            assert (await pipe.execute())[0] == 3
        if how == signal.SIGSTOP:
            await subscription.connection.disconnect()  # a reader that hears nothing pings, and gives up
        assert (await subscription.get_message(timeout=HANG_S))["type"] == "subscribe"
        assert await other.publish(channel, b"frame") == 1
        assert (await subscription.get_message(timeout=HANG_S))["data"] == b"frame"
    await asyncio.to_thread(cluster.thaw if how == signal.SIGSTOP else cluster.restart, old)
    await cluster.until(lambda: cluster.whole() and cluster.in_step())


async def test_what_a_frozen_primary_acknowledges_when_it_goes_on_is_not_lost(cluster: Cluster, redis: Redis) -> None:
    one, many, watched = (f"parallm:{{a}}:{name}" for name in ("one", "many", "watched"))
    await asyncio.gather(*(redis.get(one) for _ in range(3)))  # a connection is there for each of the three
    transaction = redis.pipeline(transaction=True)
    await transaction.watch(watched)
    transaction.multi()
    transaction.set(watched, 1, ex=600)
    await cluster.until(cluster.in_step)
    async with cluster.away(one, signal.SIGSTOP) as old:
        waiting = [
            asyncio.ensure_future(each)
            for each in (
                redis.set(one, 1, ex=600),
                ask_all(redis, [("SET", many, 1, "EX", 600)]),
                transaction.execute(),
            )
        ]
    await asyncio.to_thread(cluster.thaw, old)
    *_, committed = await asyncio.gather(*waiting, return_exceptions=True)
    await cluster.until(lambda: cluster.whole() and cluster.in_step())
    assert await redis.mget([one, many]) == [b"1", b"1"]
    assert isinstance(committed, WatchError) and not await redis.exists(watched)


async def test_slots_that_move_while_they_are_used_are_found_again(cluster: Cluster, redis: Redis) -> None:
    key = "parallm:{a}:model"
    slot, there = slot_of(key), cluster.primary_of(key)
    target = next(server for server in cluster.primaries() if server is not there)
    with cluster.client(there) as source, cluster.client(target) as sink:
        names = [client.execute_command("CLUSTER MYID") for client in (source, sink)]
        await redis.set(key, 1, ex=600)
        sink.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[0])
        source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[1])
        assert await redis.incr(key) == 2, "what is still there"
        assert await redis.incr("parallm:{a}:other") == 1, "what is not goes to where it will be"
        assert await ask_all(redis, [("INCR", "parallm:{a}:other"), ("GET", key)]) == [2, b"2"]
        watching = redis.pipeline()
        await watching.watch(key)
        both = redis.pipeline(transaction=True)
        both.incr(key)
        both.incr("parallm:{a}:third")
        waiting = asyncio.create_task(both.execute())
        await wait_until(lambda: refused_a_transaction(source))
        source.migrate("127.0.0.1", target.port, key, 0, 1000, auth="s3cret")
        for server in cluster.primaries():
            with cluster.client(server) as client:
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[1])
    with pytest.raises(WatchError):
        await watching.exists(key)
    await watching.aclose()
    assert await waiting == [3, 1], "a transaction waits until all of it is there"
    expiring = [("EXPIRE", f"parallm:{{a}}:{name}", 600) for name in ("other", "third")]
    assert await ask_all(redis, [("INCR", key), *expiring]) == [4, 1, 1]


async def test_the_wrong_kind_of_url_is_refused_at_the_start(cluster: Cluster, redis_url: str) -> None:
    await require(cluster.url)
    one = f"redis://:s3cret@127.0.0.1:{cluster.primaries()[0].port}"
    with pytest.raises(SetupError, match=r"server of a Redis Cluster: give it as redis\+cluster"):
        await require(one)
    with pytest.raises(SetupError, match="is in no cluster"):
        await require(redis_url.replace("redis://", "redis+cluster://"))
    with pytest.raises(ServiceUnavailableError, match="password"):
        await require(cluster.url.replace("s3cret", "wrong"))
    with pytest.raises(ServiceUnavailableError, match=r"127\.0\.0\.1:1: "):
        await require("redis+cluster://127.0.0.1:1", within_s=0.2)


def connect_blocking(redis: Redis) -> Redis:
    assert isinstance(redis, ClusterRedis)
    (host, port), *_ = redis.topology.members
    return connect(f"redis+cluster://:s3cret@{host}:{port}", blocking=True)


async def refused_a_transaction(server: "sync_redis.Redis[bytes]") -> bool:
    return "errorstat_TRYAGAIN" in server.info("errorstats")


async def all_wait(redis: Redis) -> bool:
    return sum(info["blocked_clients"] for info in await infos(redis)) == len({slot_of(key) for key in KEYS})
