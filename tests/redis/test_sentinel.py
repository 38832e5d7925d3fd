"""Redis under Sentinel: the primary is killed or frozen, and everybody goes on at its successor."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from shared.errors import ServiceUnavailableError, SetupError
from shared.redis.connection.address import RedisUrl
from shared.redis.connection.client import answers, connect, require
from shared.redis.tokens.reader import FrameReader
from tests.redis.api_servers import api
from tests.redis.outages import an_idle_worker_wakes, sequences_end_exactly_once, streams_go_on
from tests.redis.scripted_worker import MODEL as SERVED
from tests.redis.scripted_worker import Answer, working
from tests.redis.sentinels import SERVICE, Watched
from tests.waiting import wait_until


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    made = await asyncio.to_thread(Watched, tmp_path)
    yield made
    made.stop()


@pytest.fixture
async def redis(watched: Watched) -> AsyncIterator[Redis]:
    client = connect(watched.url)
    yield client
    await client.aclose()


async def test_commands_find_the_new_primary(watched: Watched, redis: Redis) -> None:
    await redis.set("before", "kept", ex=60)
    await watched.in_step()
    old = await asyncio.to_thread(lambda: watched.primary)
    old.kill()
    assert await redis.set("during", "waited", ex=60), "a call made while there is no primary waits for one"
    assert await redis.get("before") == b"kept"
    await wait_until(lambda: watched.primary is not old)  # the Sentinels hear of it one after the other
    with watched.client(watched.primary) as client:
        assert client.get("during") == b"waited"


async def test_a_primary_that_is_demoted_is_left_at_once(watched: Watched, redis: Redis) -> None:
    await redis.set("a", 1, ex=60)
    with watched.client(watched.servers[0]) as old, watched.client(watched.servers[1]) as new:
        new.replicaof("NO", "ONE")
        old.replicaof(*map(str, watched.servers[1].place))
        for sentinel in watched.sentinels:
            await asyncio.to_thread(watched.point, sentinel, watched.servers[1])
        assert await redis.set("a", 2, ex=60), "the open connection says READONLY; the command goes to the new primary"
        assert new.get("a") == b"2"


async def test_a_frozen_primary_is_left_when_it_does_not_answer(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.redis.connection.client.ANSWER_OF_PRIMARY_S", 2)
    redis = connect(watched.url)
    await redis.set("a", 1, ex=60)
    old = await watched.fail_over(signal.SIGSTOP)
    try:
        assert await redis.set("a", 2, ex=60)
    finally:
        old.signal(signal.SIGCONT)
        await redis.aclose()


async def test_every_sequence_ends_exactly_once(watched: Watched, redis: Redis) -> None:
    await sequences_end_exactly_once(watched, redis)


async def test_a_subscription_goes_on_at_the_new_primary(watched: Watched, redis: Redis) -> None:
    reader = FrameReader(watched.url, "a")
    await reader.start()
    await streams_go_on(watched, redis, reader, 400)
    with watched.client(await asyncio.to_thread(lambda: watched.primary)) as client:
        assert client.pubsub_channels(), "the reader listens there"
    await reader.stop()


async def test_an_idle_worker_wakes_after_a_failover(watched: Watched, redis: Redis) -> None:
    await an_idle_worker_wakes(watched, redis)


async def test_passwords_of_servers_and_sentinels(tmp_path: Path) -> None:
    made = await asyncio.to_thread(lambda: Watched(tmp_path, replicas=0, password="s3cret", sentinel_password="wh0"))
    try:
        await require(made.url, 1)
        with pytest.raises(ServiceUnavailableError, match=r"no Sentinel answers .*WRONGPASS") as caught:
            await require(made.url.replace("wh0", "wr0ng"), 0.2)
        with pytest.raises(ServiceUnavailableError, match=r"(?i)password|auth"):
            await require(made.url.replace("s3cret", "wr0ng"), 0.2)
        assert "wr0ng" not in str(caught.value)
    finally:
        made.stop()


async def test_tls_to_sentinels_and_servers(tmp_path: Path, certificate: Path) -> None:
    binary = os.environ.get("PARALLM_TEST_REDIS")  # the embedded server is built without TLS
    if binary is None:
        pytest.skip("PARALLM_TEST_REDIS names no server that speaks TLS")
    made = await asyncio.to_thread(lambda: Watched(tmp_path, tls=certificate, binary=Path(binary)))
    redis = connect(made.url)
    try:
        await redis.set("a", 1, ex=60)
        await made.in_step()
        await made.fail_over()
        assert await redis.get("a") == b"1"
        with pytest.raises(ServiceUnavailableError, match=r"(?i)certificate"):
            await require(made.url.partition("?")[0], 0.2)
    finally:
        await redis.aclose()
        made.stop()


async def test_an_unknown_service_is_a_wrong_setting_and_the_known_ones_are_named(watched: Watched) -> None:
    url = watched.url.replace(f"/{SERVICE}/", "/rung/")
    with pytest.raises(SetupError, match=rf"know no service 'rung'; they watch: {SERVICE}"):
        await require(url)
    assert not await answers(url, 0.2)


async def test_sentinels_that_do_not_answer_are_named(watched: Watched) -> None:
    for sentinel in watched.sentinels:
        sentinel.kill()
    hosts = RedisUrl.of(watched.url).hosts.split(",")
    with pytest.raises(ServiceUnavailableError, match=r"no Sentinel answers") as caught:
        await require(watched.url, 0.2)
    assert all(host in str(caught.value).partition("no Sentinel answers")[2] for host in hosts)


async def test_one_sentinel_of_three_is_enough_to_join(watched: Watched) -> None:
    for sentinel in watched.sentinels[:2]:
        sentinel.kill()
    await require(watched.url, 1)


async def test_an_api_streams_across_a_failover(watched: Watched) -> None:
    body = {"model": SERVED, "prompt": "hi"}
    async with (
        working(watched.url, lambda spec: Answer("over two servers", hold_at=5)) as worker,
        api(watched.url) as server,
        server.stream("/v1/completions", body) as events,
    ):
        for _ in range(5):
            await events.next()
        await watched.in_step()
        await watched.fail_over()
        worker.go.set()
        chunks = await events.all()
    assert events.done
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "over two servers"
