"""Trajectories from live traffic: admitted by the api, settled by whoever settles, scored by a runner, queued once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from shared.frames import VersionSpan
from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.redis.training.trajectory_intake import TrajectoryIntake
from shared.redis.training.trajectory_queue import CONSUMER, TrajectoryQueue
from shared.scoring.pool import RewardPool
from shared.sequences import SequenceSpec
from shared.trajectories import LiveTrajectory, Trajectory
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import CARD, MODEL, Answer, working
from tests.unit.api_texts import EOS, bundle, codec, ids
from tests.unit.trainer_samples import trajectory
from tests.waiting import HANG_S, wait_until
from trainer.rollouts.groups import RolloutGroup
from trainer.rollouts.live import LiveCollector
from trainer.rollouts.pacing import StaleWatch
from worker.jobs.collecting import Collecting
from worker.jobs.context import TickContext

ASK = {"model": MODEL, "prompt": "say", "max_tokens": 16, "collect_trajectory": True, "scoring_function": "exact"}
REFERENCE = {"metadata": {"reference": "hello", "difficulty": "hard"}}


def script(spec: SequenceSpec) -> Answer:
    held = codec().decode(spec.prompt_ids).startswith("hold")
    answer = Answer("hello", hold_at=2 if held else None)
    return Answer("hello", hold_at=answer.hold_at, versions={0: spec.adapter} if "@" in spec.adapter else {})


@contextlib.asynccontextmanager
async def scorer(redis_url: str, name: str = "r1") -> AsyncIterator[Collecting]:
    redis, blocking, pool = connect(redis_url), connect(redis_url, blocking=True), RewardPool(1)
    try:
        yield Collecting(TickContext(name, redis, blocking, pool), 100, 1 << 20)
    finally:
        pool.close()
        await redis.aclose()
        await blocking.aclose()


async def taken(runner: Collecting) -> int:
    """How many entries were taken, and scored to their end."""
    count = await runner.collect(MODEL)
    await asyncio.gather(*runner.under_way)
    return count


async def collected(redis: Redis, policy: str = "policy") -> list[LiveTrajectory]:
    return [each.live for each in await TrajectoryQueue(redis, policy).peek()]


@pytest.mark.cluster
async def test_each_sample_becomes_one_scored_trajectory(server: Api, redis: Redis, redis_url: str) -> None:
    answer = (await server.post("/v1/completions", {**ASK, **REFERENCE, "n": 2})).json()
    async with scorer(redis_url) as runner:
        await wait_until(lambda: _length(redis, 2))
        assert await taken(runner) == 2
        assert await taken(runner) == 0
    first, second = sorted(await collected(redis), key=lambda live: live.id)
    assert [first.id, second.id] == [f"{answer['id']}-0", f"{answer['id']}-1"]
    assert first.group == second.group and first.group_size == 2
    t = first.trajectory
    assert (t.prompt_ids, t.completion_ids) == (tuple(ids("say")), (*ids("hello"), EOS))
    assert t.logprobs == (-0.25,) * 6 and t.spans == (VersionSpan("", 0, 6),)
    assert t.reward is not None and (t.reward.name, t.reward.value) == ("exact", 1.0)
    assert t.metadata == {"difficulty": "hard"} and t.text == "hello" and t.finish_reason == "stop"


async def test_a_reward_model_whose_workers_are_gone_keeps_nobody_else_waiting(
    server: Api, redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.jobs.collecting.SCORED", 8)  # all of which wait for it
    await WorkerRegistry(redis).register_model(msgspec.structs.replace(CARD, name="gone", base_sha256="g"), bundle())
    slow = {"name": "likelihood", "model": "gone"}
    await server.post("/v1/completions", {**ASK, **REFERENCE, "scoring_function": slow, "n": 8})
    good = (await server.post("/v1/completions", {**ASK, **REFERENCE})).json()
    plain = (await server.post("/v1/completions", {**ASK, "scoring_function": None})).json()
    async with scorer(redis_url) as runner:
        running = asyncio.create_task(runner.run())

        async def both() -> bool:
            return {live.id for live in await collected(redis)} == {f"{each['id']}-0" for each in (good, plain)}

        try:
            await wait_until(both)
            await wait_until(lambda: _length(redis, 8))  # what is added is forgotten a moment later
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await runner.context.served.close()


async def test_what_found_no_place_is_scored_as_soon_as_there_is_one(
    server: Api, redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.jobs.collecting.AT_ONCE", 2)
    monkeypatch.setattr("worker.jobs.collecting.LANE", 4)
    await server.post("/v1/completions", {**ASK, **REFERENCE, "n": 12})
    opened, asked = asyncio.Event(), 0
    async with scorer(redis_url) as runner:
        score = runner.context.rewards.score

        async def slow(*given: Any, **named: Any) -> Any:
            nonlocal asked
            asked += len(given[1])
            await opened.wait()
            return await score(*given, **named)

        monkeypatch.setattr(runner.context.rewards, "score", slow)
        running = asyncio.create_task(runner.run())

        async def all_read() -> bool:
            return bool((await redis.xpending(keys.collected(MODEL), TrajectoryIntake.group))["pending"] == 12)

        async def all_scored() -> bool:
            return len(await collected(redis)) == 12

        try:
            await wait_until(all_read)
            assert asked == 4, "no more than there are places"
            opened.set()
            await wait_until(all_scored)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_what_a_dead_runner_held_is_found_behind_all_that_another_one_has_put_off(
    server: Api, redis: Redis, redis_url: str
) -> None:
    await server.post("/v1/completions", {**ASK, **REFERENCE})
    stream = keys.collected(MODEL)
    await wait_until(lambda: _length(redis, 1))
    ((_, fields),) = await redis.xrange(stream)
    entries = [await redis.xadd(stream, fields) for _ in range(800)]
    await redis.xreadgroup(TrajectoryIntake.group, "dead", {stream: ">"})
    await redis.xclaim(stream, TrajectoryIntake.group, "dead", 0, entries[-1:], idle=3_600_000)
    async with scorer(redis_url) as runner:
        counts = [await runner.collect(MODEL) for _ in range(3)]
        await asyncio.gather(*runner.under_way)
    assert sum(counts) == 1 and not await redis.xrange(stream, entries[-1], entries[-1])


async def _length(redis: Redis, count: int) -> bool:
    return bool(await redis.xlen(keys.collected(MODEL)) == count)


async def test_a_streamed_chat_on_an_adapter_goes_to_its_policy(server: Api, redis: Redis, redis_url: str) -> None:
    await publish(server.ring.adapters, "mine")
    chat: dict[str, Any] = {"model": "mine", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}
    async with server.stream("/v1/chat/completions", {**chat, "collect_trajectory": True}) as events:
        chunks = await events.all()
    async with scorer(redis_url) as runner:
        await wait_until(lambda: _length(redis, 1))
        await runner.collect(MODEL)
    (live,) = await collected(redis, "mine")
    assert live.id == f"{chunks[0]['id']}-0" and live.group == ""
    assert live.trajectory.spans == (VersionSpan("mine@1", 0, 6),)
    assert live.trajectory.reward is None, "nobody asked for a score"
    assert await collected(redis) == []


async def test_a_client_that_leaves_leaves_its_trajectory(server: Api, redis: Redis, redis_url: str) -> None:
    body = {**ASK, **REFERENCE, "prompt": "hold on", "stream": True}
    async with server.http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                break
    async with scorer(redis_url) as runner:
        await wait_until(lambda: _length(redis, 1))
        await runner.collect(MODEL)
    (live,) = await collected(redis)
    assert live.trajectory.finish_reason == "cancelled" and live.trajectory.reward is None
    assert 0 < len(live.trajectory.completion_ids) < 6


async def test_a_sequence_cancelled_while_it_waits_is_collected_too(redis: Redis, redis_url: str) -> None:
    async with working(redis_url, script) as worker:
        pass  # it has registered the model, and is gone again
    async with api(redis_url) as server:
        asking = asyncio.create_task(server.post("/v1/completions", {**ASK, **REFERENCE}))
        await wait_until(lambda: _waiting(redis))
        asking.cancel()
        await wait_until(lambda: _length(redis, 1))
    (settled,) = await TrajectoryIntake(redis, MODEL).read("r", 10)
    assert settled.result.finish.reason == "cancelled" and settled.spec.collect is not None
    assert worker.specs == []


async def _waiting(redis: Redis) -> bool:
    return bool(await redis.xlen(keys.queue(MODEL, "interactive")))


async def test_a_runner_that_dies_before_it_forgets_doubles_nothing(
    server: Api, redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.post("/v1/completions", {**ASK, **REFERENCE})
    await wait_until(lambda: _length(redis, 1))

    async def die(intake: TrajectoryIntake, settled: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(TrajectoryIntake, "done", die)
        async with scorer(redis_url) as dying:
            assert await taken(dying) == 1
            assert (await redis.xpending(keys.collected(MODEL), TrajectoryIntake.group))["pending"] == 1
    monkeypatch.setattr("shared.redis.training.trajectory_intake.TAKE_OVER_MS", 0)
    async with scorer(redis_url, "r2") as next_one:
        assert await taken(next_one) == 1
    assert len(await collected(redis)) == 1
    assert await redis.xpending(keys.collected(MODEL), TrajectoryIntake.group) == {
        "pending": 0, "min": None, "max": None, "consumers": []
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"scoring_function": "no_such"}, "scoring_function"),
        ({"scoring_function": {"name": "exact", "wrong": 1}}, "scoring_function"),
        ({"scoring_function": {"strip": True}}, "scoring_function"),
        ({"metadata": {}}, "metadata.reference"),
        ({"collect_trajectory": False}, "scoring_function"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"metadata": {"reference": "a", "long": "x" * 20_000}}, "metadata"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"metadata": {"reference": 2**70}}, "metadata"),
        ({"scoring_function": {"name": "length", "target": 2**70}}, "scoring_function"),
    ],
)
async def test_what_cannot_be_collected_is_refused_by_name(server: Api, changes: dict[str, Any], param: str) -> None:
    answer = await server.post("/v1/completions", {**ASK, **REFERENCE, **changes})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def live(number: int, text: str = "") -> LiveTrajectory:
    return LiveTrajectory(f"t{number}", "p", "m", Trajectory(0, 0, (1,), (2,), text, (-1.0,), "stop"))


async def test_the_queue_drops_the_oldest_beyond_its_bounds_and_counts_them(redis: Redis) -> None:
    queue = TrajectoryQueue(redis, "p", max_entries=3, max_bytes=4000)
    assert [await queue.add(live(i)) for i in (0, 1, 2, 3, 3)] == [True, True, True, True, False]
    assert [each.live.id for each in await queue.peek()] == ["t1", "t2", "t3"]
    await queue.add(live(4, "x" * 3700))
    assert [each.live.id for each in await queue.peek()][-1] == "t4"
    stats = await redis.hgetall(keys.trajectory_stats("p"))
    waiting = await redis.xrange(keys.trajectories("p"))
    assert int(stats[b"added"]) == 5 and int(stats[b"dropped"]) == 5 - len(waiting)
    assert int(stats[b"bytes"]) == sum(int(fields[b"size"]) for _, fields in waiting) <= 4000


@pytest.mark.cluster
async def test_a_trainer_that_comes_back_gets_what_it_had_read_first(redis: Redis) -> None:
    queue = TrajectoryQueue(redis, "p")
    for i in range(5):
        await queue.add(live(i))
    first = await queue.take(CONSUMER, 3)
    await queue.done([first[0].entry])
    again = TrajectoryQueue(redis, "p")
    assert [each.live.id for each in await again.take(CONSUMER, 2)] == ["t1", "t2"]
    assert [each.live.id for each in await again.take(CONSUMER, 9) or await again.take(CONSUMER, 9)] == ["t3", "t4"]
    await again.done([each.entry for each in first])
    stats = await redis.hgetall(keys.trajectory_stats("p"))
    assert int(stats[b"consumed"]) == 3, "said again it changes nothing"


async def test_live_traffic_from_before_an_adoption_is_dropped_without_an_alert(redis: Redis) -> None:
    queue, watch = TrajectoryQueue(redis, "p"), StaleWatch("live trajectories", after=2, max_lag=1)

    def traffic(name: str, version: int) -> LiveTrajectory:
        return LiveTrajectory(name, "p", MODEL, trajectory(1.0, spans=[(f"p@{version}", 0, 2)]))

    def lag(group: RolloutGroup) -> int:
        return 9 - int(group.trajectories[0].spans[0].version.partition("@")[2])

    collector = LiveCollector(queue, 1, 1, 60.0, watch=watch)
    for number in range(4):
        assert await queue.add(traffic(f"before-{number}", 1))
    await collector.adopted()
    async with collector, asyncio.timeout(HANG_S):
        assert await queue.add(traffic("fresh", 9))
        assert [group.id for group in await collector.next_batch(lag)] == ["live-fresh"]
        alert = asyncio.create_task(watch.wait())
        batch = asyncio.create_task(collector.next_batch(lag))
        assert collector.dropped["stale"] == 4 and not alert.done()
        for number in range(2):
            assert await queue.add(traffic(f"after-{number}", 1))
        assert "2 live trajectories" in await alert, "what comes later is an alert, as ever"
        batch.cancel()
        await asyncio.gather(batch, return_exceptions=True)
