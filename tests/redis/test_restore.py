"""A ring's data come back: from copies of the server's files, and from 0.1.0."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from api.serve.embedded_redis import EmbeddedRedis
from shared.process.process_settings import RunnerSettings
from shared.process.settings import load
from shared.redis import keys
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.client import connect
from shared.redis.jobs.store import JobStore
from shared.redis.queue.sequence_queue import SequenceQueue
from shared.redis.training.trajectory_queue import CONSUMER, TrajectoryQueue
from shared.trajectories import LiveTrajectory
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api
from tests.redis.clusters import Cluster
from tests.redis.job_fakes import prompts, spec
from tests.redis.outages import write_at_once
from tests.redis.ring_data import POLICY, TEXT, Left, dumped, leave, restore, script
from tests.redis.scripted_worker import MODEL, working
from tests.unit.trainer_samples import trajectory
from tests.waiting import HANG_S, wait_until
from trainer.rollouts.groups import RolloutGroup
from trainer.rollouts.live import LiveCollector
from worker.jobs import runner as runner_module

RECORDED = Path("tests/redis/data/ring-0.1.0.xz").read_bytes()


async def test_data_of_0_1_0_are_served_and_work_that_waited_is_done(redis: Redis, redis_url: str) -> None:
    left = await restore(redis, RECORDED)
    await check(redis, redis_url, left)
    queue = TrajectoryQueue(redis, POLICY)
    assert [each.live.id for each in await queue.take(CONSUMER, 9)] == ["t0", "t1", "t2"]


async def check(redis: Redis, redis_url: str, left: Left) -> None:
    """Read what is stored, and let what waits be done."""
    async with working(redis_url, script), api(redis_url, feedback_ttl_days=1) as server:
        stored = (await server.http.get(f"/v1/responses/{left.response}")).raise_for_status().json()
        assert stored["output"][0]["content"][0]["text"] == TEXT
        follow_up = {"model": MODEL, "input": "and now?", "previous_response_id": left.response}
        assert (await server.post("/v1/responses", follow_up)).status_code == 200
        assert (await server.http.get(f"/v1/files/{left.file}/content")).content == b'{"a": 1}\n'
        async with running(redis_url):
            await wait_until(lambda: has_ended(server, f"/v1/jobs/{left.job}", "succeeded"))
            await wait_until(lambda: is_judged(server, left.completion))
            await wait_until(lambda: has_ended(server, f"/v1/responses/{left.waiting}", "completed"))
        lines = (await server.http.get(f"/v1/jobs/{left.job}/results")).text.splitlines()
        assert len(lines) == 4
    store = AdapterStore(redis)
    assert await store.versions(POLICY) == [1, 2] and await store.latest(POLICY) == 2
    assert (await publish(store, POLICY, seed=3)).version == 3
    ahead = await publish(store, POLICY, seed=4, parent=10)
    assert ahead.version == 11, "a run that is ahead of what was restored gives no number a second time"


@asynccontextmanager
async def running(redis_url: str) -> AsyncIterator[None]:
    """A job runner in this process."""
    task = asyncio.create_task(runner_module.run(load(RunnerSettings, ["--redis", redis_url])))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def has_succeeded(redis: Redis, job: str) -> bool:
    return (await JobStore(redis).status(job)).status == "succeeded"


async def is_empty(redis: Redis) -> bool:
    depth = await SequenceQueue(redis, MODEL).depth()
    return not any(each.waiting or each.leased for each in depth.values())


async def lasting(redis: Redis) -> set[bytes]:
    """Keys that live for an hour at least."""
    return {key for key, ttl_ms, _ in await dumped(redis) if ttl_ms > 3_000_000}


async def is_judged(server: Api, answer: str) -> bool:
    """True once a runner has made the answer one that can be judged, and it was."""
    judged = await server.post("/v1/feedback", {"id": answer, "reward": 1.0})
    return judged.status_code == 200 and bool(judged.json()["status"] == "counted")


async def has_ended(server: Api, path: str, state: str) -> bool:
    found: dict[str, Any] = (await server.http.get(path)).raise_for_status().json()
    return bool(found["status"] == state)


async def test_copies_of_the_servers_files_have_all_of_it_and_nothing_is_learned_twice(tmp_path: Path) -> None:
    def lag(group: RolloutGroup) -> int:
        return 0

    with EmbeddedRedis(tmp_path / "first") as server:
        write_at_once(server.url)  # its log is copied right after the last write
        redis = connect(server.url)
        left, queue = await leave(redis, server.url), TrajectoryQueue(redis, POLICY)
        shutil.copytree(tmp_path / "first/redis/appendonlydir", tmp_path / "log/redis/appendonlydir")
        await redis.save()
        (tmp_path / "snapshot/redis").mkdir(parents=True)
        shutil.copy(tmp_path / "first/redis/dump.rdb", tmp_path / "snapshot/redis")
        before = await lasting(redis)
        async with asyncio.timeout(HANG_S), LiveCollector(queue, 3, 1, 60.0) as collector:
            assert len(await collector.next_batch(lag)) == 3
            await collector.saved()
            books = collector.books
        await redis.aclose()
    for kind in ("log", "snapshot"):
        with EmbeddedRedis(tmp_path / kind) as server:
            redis = connect(server.url)
            assert await lasting(redis) == before
            queue = TrajectoryQueue(redis, POLICY)
            await queue.add(LiveTrajectory("new", POLICY, MODEL, trajectory(1.0)))
            async with asyncio.timeout(HANG_S), LiveCollector(queue, 1, 1, 60.0, books=books) as collector:
                assert [group.id for group in await collector.next_batch(lag)] == ["live-new"]
                assert collector.dropped == {"taken before": 3}
            if kind == "snapshot":
                await check(redis, server.url, left)
            await redis.aclose()


async def test_copies_of_a_clusters_shards_from_two_moments_come_back_and_nothing_is_learned_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's shard is copied last: it knows ends of sequences whose samples the job's copy does not have."""
    monkeypatch.setattr("worker.jobs.work.REPAIR_AFTER_S", 0.2)

    def lag(group: RolloutGroup) -> int:
        return 0

    def copies(moment: str) -> dict[int, Path]:
        for server in cluster.servers:
            cluster.copy(server, tmp_path / moment / str(server.port))
        return {server.port: tmp_path / moment / str(server.port) for server in cluster.servers}

    (tmp_path / "servers").mkdir()
    cluster = await asyncio.to_thread(Cluster, tmp_path / "servers", options={"appendfsync": "always"})
    try:
        redis = connect(cluster.url)
        left, queue, last = await leave(redis, cluster.url), TrajectoryQueue(redis, POLICY), ""
        models = cluster.primary_of(keys.sequence(MODEL, ""))
        assert models is not cluster.primary_of(keys.trajectories(POLICY))
        while not last or cluster.primary_of(keys.job(last)) is models:
            last, _ = await JobStore(redis).create(spec("generate", model=MODEL), prompts(3))
        earlier = copies("earlier")
        async with asyncio.timeout(HANG_S), LiveCollector(queue, 3, 1, 60.0) as collector:
            assert len(await collector.next_batch(lag)) == 3
            await collector.saved()
            books = collector.books
        async with working(cluster.url, script), running(cluster.url):
            for job in (left.job, last):
                await wait_until(lambda job=job: has_succeeded(redis, job))
            await wait_until(lambda: is_empty(redis))  # this worker takes over from no other one
        await redis.aclose()
        await asyncio.to_thread(cluster.restore, earlier | {models.port: copies("later")[models.port]})

        redis = connect(cluster.url)
        queue = TrajectoryQueue(redis, POLICY)
        await queue.add(LiveTrajectory("new", POLICY, MODEL, trajectory(1.0)))
        async with asyncio.timeout(HANG_S), LiveCollector(queue, 1, 1, 60.0, books=books) as collector:
            assert [group.id for group in await collector.next_batch(lag)] == ["live-new"]
            assert collector.dropped == {"taken before": 3}
        assert not await has_succeeded(redis, last)
        await check(redis, cluster.url, left)
        async with working(cluster.url, script), running(cluster.url):
            await wait_until(lambda: has_succeeded(redis, last))
        assert len(await JobStore(redis).results(last)) == 3
        await redis.aclose()
    finally:
        cluster.stop()
