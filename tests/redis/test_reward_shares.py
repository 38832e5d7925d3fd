"""Rewards that hang: they end their own job, and hold up nobody else's."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from api.ring.ordered_scores import OrderedScores
from shared.jobs import TERMINAL, JobInput, JobSpec, RewardSpec
from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.jobs.store import JobStore
from shared.redis.queue.sequence_queue import SequenceQueue
from shared.scoring.pool import RewardPool, RewardSample
from shared.scoring.shares import Share
from tests.redis.job_fakes import MODEL, FakeWorker, lines, prompts, register, spec, working
from tests.redis.test_jobs_ticks import advance
from tests.waiting import HANG_S, wait_until
from worker.jobs import work
from worker.jobs.context import TickContext
from worker.jobs.scores import Scores
from worker.jobs.tick import tick

HANGS = {"name": "regex", "options": {"pattern": "^(a+)+$"}}
TEXT = "a" * 60 + "!"


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    await register(client)
    yield client
    await client.aclose()


@pytest.fixture
async def runner(redis: Redis, redis_url: str) -> AsyncIterator[TickContext]:
    blocking = connect(redis_url, blocking=True)
    pool = RewardPool(1, timeout_s=0.1)
    context = TickContext("r1", redis, blocking, pool, window=64)
    yield context
    context.close()
    pool.close()
    await blocking.aclose()


def given(count: int, text: str, reward: dict[str, Any], key: str) -> tuple[JobSpec, list[bytes]]:
    fields: dict[str, Any] = {"model": "nobody", "score_logprobs": False, "reward": reward, "key": key}
    return spec("score", **fields), lines(JobInput("p", "1", text) for _ in range(count))


async def test_a_reward_that_keeps_timing_out_ends_its_job_with_the_reason(redis: Redis, runner: TickContext) -> None:
    job, _ = await JobStore(redis).create(*given(200, TEXT, HANGS, "bad"))
    status = await advance(runner, job)
    assert status.status == "failed"
    assert "'regex' timed out on" in status.error and "in a row" in status.error
    assert status.reward_errors < 200, "what is in hand when the job ends is recorded without a reward"
    assert status.counts.succeeded + status.counts.failed + status.counts.cancelled == 200


async def test_a_rollout_whose_reward_hangs_ends_too_and_takes_its_sequences_along(
    redis: Redis, runner: TickContext
) -> None:
    job, _ = await JobStore(redis).create(spec("rollout", reward=HANGS, key="bad"), prompts(300))
    async with working(FakeWorker(redis, lambda sequence: TEXT if len(sequence.prompt_ids) < 10 else None, rows=100)):
        status = await advance(runner, job)
    assert status.status == "failed" and "timed out" in status.error
    assert status.counts.failed > 0
    assert (await SequenceQueue(redis, MODEL).depth())["batch"].waiting == 0
    assert not await redis.exists(keys.finished(MODEL, job))


async def test_another_key_s_job_is_done_while_sixteen_hang(
    redis: Redis, runner: TickContext, monkeypatch: Any
) -> None:
    bad = [(await JobStore(redis).create(*given(500, TEXT, HANGS, "bad")))[0] for _ in range(16)]
    monkeypatch.setattr("shared.scoring.shares.GIVE_UP_AFTER", 10**9)
    runner.pool.timeout_s = 0.5  # the good job's samples have to be in time on a busy machine, too

    async def ticks(job: str) -> None:
        while (await JobStore(redis).status(job)).status not in TERMINAL:
            await tick(runner, job, int(await redis.hget(keys.job(job), "tick") or 0))  # type: ignore[misc]

    running = [asyncio.create_task(ticks(job)) for job in bad]
    await wait_until(lambda: len(runner._rewarding) == 16)
    good, _ = await JobStore(redis).create(*given(8, "1", {"name": "exact"}, "good"))
    status = await advance(runner, good)
    assert (status.status, status.mean_reward) == ("succeeded", 1.0)
    done = [(await JobStore(redis).status(job)) for job in bad]
    assert all(each.status == "running" and each.counts.succeeded < 100 for each in done)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_what_a_dead_runner_had_in_hand_is_scored_by_the_next(
    redis: Redis, redis_url: str, runner: TickContext, monkeypatch: Any
) -> None:
    runner.pool.timeout_s = HANG_S
    job, _ = await JobStore(redis).create(*given(5, "1", {"name": "exact"}, ""))
    stored = await JobStore(redis).spec(job)
    half = await work.JobWork.on(runner, stored)
    await half._expand(await runner.ledger.progress(job))
    assert (await JobStore(redis).status(job)).counts.running == 5
    runner.close()
    assert (await advance(runner, job)).counts.succeeded == 5


async def test_a_slow_order_holds_up_no_other_and_goes_with_its_client(redis: Redis, runner: TickContext) -> None:
    runner.pool.timeout_s = 1.0
    scoring = asyncio.create_task(Scores(runner).run())
    ordered = OrderedScores(redis, 60)
    slow = asyncio.create_task(ordered.score(RewardSpec(**HANGS), [RewardSample(TEXT, None)] * 1000, Share("bad")))
    await wait_until(lambda: bool(runner.pool.processes))
    (reward,) = await ordered.score(RewardSpec("exact"), [RewardSample("1", "1")], Share("good"))
    assert reward.value == 1.0 and not slow.done()
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    assert not await redis.xlen(keys.score_orders())
    await wait_until(lambda: not runner.pool._turns._all.wants)
    scoring.cancel()
    await asyncio.gather(scoring, return_exceptions=True)
