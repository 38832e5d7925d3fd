"""Redis under Sentinel: the primary is killed or frozen, and everybody goes on at its successor."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from shared.errors import ServiceUnavailableError, SetupError
from shared.redis.address import Parts
from shared.redis.client import answers, connect, require
from shared.redis.token_frames import FrameReader, FrameWriter
from tests.redis.api_servers import api
from tests.redis.scripted_worker import MODEL as SERVED
from tests.redis.scripted_worker import Answer, working
from tests.redis.sentinels import SERVICE, Watched
from tests.redis.sequences import MODEL, commit, ending, gathered, ids, plan, queue, spec, stop, tokens
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
    new = await asyncio.to_thread(lambda: watched.primary)
    assert new is not old
    with watched.client(new) as client:
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
    monkeypatch.setattr("shared.redis.client.ANSWER_UNDER_SENTINEL_S", 2)
    redis = connect(watched.url)
    await redis.set("a", 1, ex=60)
    old = await watched.fail_over(signal.SIGSTOP)
    try:
        assert await redis.set("a", 2, ex=60)
    finally:
        old.signal(signal.SIGCONT)
        await redis.aclose()


async def test_every_sequence_ends_exactly_once(watched: Watched, redis: Redis) -> None:
    q = queue(redis, lease_ms=300)
    await q.enqueue([spec(f"s{i}", job="j") for i in range(50)])
    claims = await q.claim("w1", plan(20))
    for claim in claims[:10]:
        assert await commit(redis, "w1", claim)
    await watched.in_step()
    done = set(ids(claims[:10]))
    enqueueing = asyncio.create_task(_after(0.3, q.enqueue([spec(f"s{i}", job="j") for i in range(45, 60)])))
    await watched.fail_over()
    assert await enqueueing == 10

    async def all_done() -> bool:
        for claim in [*await q.claim("w2", plan(60)), *await q.reap("w2", 60)]:
            assert claim.spec.id not in done, "a finished one came again"
            done.add(claim.spec.id)
            assert await commit(redis, "w2", claim)
        return len(done) == 60

    await wait_until(all_done, 20)
    assert sorted(result.id for result in await gathered(redis, "j")) == sorted(f"s{i}" for i in range(60))


async def test_a_subscription_goes_on_at_the_new_primary(watched: Watched, redis: Redis) -> None:
    q = queue(redis, lease_ms=60_000)
    reader = FrameReader(watched.url, "a")
    await reader.start()
    seqs = [f"s{i}" for i in range(8)]
    feed = reader.open(MODEL, seqs)
    await q.enqueue([spec(seq, api="a") for seq in seqs])
    claims = await q.claim("w1", plan(8))
    await watched.in_step()
    writer, total = FrameWriter(redis, MODEL, "w1"), 800

    async def write() -> None:
        for position in range(total):
            chunk = {seq: [tokens(seq, position - 15, 16)] for seq in seqs} if position % 16 == 15 else {}
            await writer.write({"a": [tokens(seq, position, 1) for seq in seqs]}, chunk, [])
            while writer.gaps:  # what the new primary never heard of; a worker logs it anew
                seq = writer.gaps.pop()
                await writer.write({}, {seq: [tokens(seq, 0, position + 1)]}, [])
            await asyncio.sleep(0.002)
        last = {seq: stop(seq, total) for seq in seqs}
        commits = [ending(claim, [last[claim.spec.id]]) for claim in claims]
        assert all(await writer.write({"a": list(last.values())}, {}, commits))

    writing = asyncio.create_task(write())
    found: dict[int, list[int]] = {i: [] for i in range(8)}
    failing: asyncio.Task[object] | None = None
    async with asyncio.timeout(60):
        while not feed.done:
            for index, event in await feed.next():
                found[index] += event.tokens
            if failing is None and len(found[0]) > 60:
                failing = asyncio.create_task(watched.fail_over())
    await writing
    assert failing is not None and await failing
    with watched.client(await asyncio.to_thread(lambda: watched.primary)) as client:
        assert client.pubsub_channels(), "the reader listens there"
    await reader.stop()
    assert all(values == [1000 + i for i in range(total)] for values in found.values())


async def test_an_idle_worker_wakes_after_a_failover(watched: Watched, redis: Redis) -> None:
    q = queue(redis)
    await q.claim("w1", plan(4))
    waiting = asyncio.create_task(q.wait("w1", 30))
    await watched.in_step()
    await watched.fail_over()
    await q.enqueue([spec("s")])
    assert await asyncio.wait_for(waiting, 20)
    assert ids(await q.claim("w1", plan(4))) == ["s"]


async def test_passwords_of_servers_and_sentinels(tmp_path: Path) -> None:
    made = await asyncio.to_thread(lambda: Watched(tmp_path, replicas=0, password="s3cret", sentinel_password="wh0"))
    try:
        await require(made.url, 1)
        with pytest.raises(ServiceUnavailableError, match=r"no Sentinel answers .*invalid username-password") as caught:
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
    hosts = Parts.of(watched.url).hosts.split(",")
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


async def _after(seconds: float, call: "asyncio.Future[int] | object") -> int:
    await asyncio.sleep(seconds)
    return await call  # type: ignore[misc]
