"""Judges that are slow, broken, absent or no longer wanted; what they say is tested on a real ring (tests/e2e)."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from redis.asyncio import Redis

from shared.jobs import RewardSpec
from shared.owners import ADMINS, Asker
from shared.redis import keys
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.client import connect
from shared.redis.jobs.store import JobStore
from shared.redis.processes.worker_registry import WorkerRegistry, WorkerStatus
from shared.redis.queue.sequence_queue import SequenceQueue
from shared.rewards.functions import load
from shared.rewards.model_kinds import JudgeOptions
from shared.scoring.pool import RewardSample
from shared.scoring.served import AT_ONCE, ServedRewards
from shared.sequences import ModelCard, SequenceSpec
from shared.trajectories import Trajectory
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import api
from tests.redis.job_fakes import MODEL, FakeWorker, bundle, context, prompts, register, spec, working
from tests.redis.scripted_worker import MODEL as SCRIPTED
from tests.redis.scripted_worker import Answer
from tests.redis.scripted_worker import working as scripted
from tests.redis.test_jobs_ticks import advance
from tests.waiting import HANG_S, wait_until

JUDGE = JudgeOptions(model=MODEL, template="{completion}", marks={"0": 0.0, "1": 1.0})
PLAIN = RewardSample("42", None)


@pytest.fixture
async def judges(redis: Redis) -> AsyncIterator[ServedRewards]:
    await register(redis)
    made = ServedRewards(redis, "judging")
    yield made
    await made.close()


def answering(sequence: SequenceSpec) -> str:
    return ""


async def test_equal_marks_and_only_so_many_samples_at_once(redis: Redis, judges: ServedRewards) -> None:
    worker = FakeWorker(redis, lambda sequence: "" if full else None, rows=1000)
    full = False
    async with working(worker):
        asked = asyncio.create_task(judges.score("judge", JUDGE, [PLAIN] * 100))
        await wait_until(lambda: len(worker.busy) == 2 * AT_ONCE)
        full = True
        rewards = await asked
    assert [reward.value for reward in rewards] == [0.5] * 100  # a scripted -0.25 a token for each mark
    assert len(worker.seen) == 200


async def test_without_a_worker_the_time_runs_out_and_nothing_stays_queued(redis: Redis, judges: ServedRewards) -> None:
    (late,) = await judges.score("judge", JUDGE, [PLAIN], within_s=0.3)
    assert late.value is None and late.error == "no answer of 'fake' within 0.3 s"
    async with working(FakeWorker(redis, answering)) as worker:
        (good,) = await judges.score("judge", JUDGE, [PLAIN], within_s=HANG_S)
        assert good.value == 0.5
        assert len(worker.seen) == 2, "what was late had been cancelled"


async def test_a_model_whose_workers_are_gone_keeps_no_other_waiting(redis: Redis, judges: ServedRewards) -> None:
    card = msgspec.structs.replace(await _card(redis), name="gone")
    await WorkerRegistry(redis).register_model(card, bundle())
    gone = msgspec.structs.replace(JUDGE, model="gone")
    stuck = asyncio.create_task(judges.score("judge", gone, [PLAIN] * 2 * AT_ONCE))
    waiting = SequenceQueue(redis, "gone")

    async def full() -> bool:
        return (await waiting.depth())["batch"].waiting == 2 * AT_ONCE  # two marks each

    await wait_until(full)
    try:
        async with working(FakeWorker(redis, answering)):
            (good,) = await judges.score("judge", JUDGE, [PLAIN], within_s=HANG_S)
        assert good.value == 0.5, good.error
        assert not stuck.done()
    finally:
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)


async def _card(redis: Redis) -> ModelCard:
    card = await WorkerRegistry(redis).card(MODEL)
    assert card is not None
    return card


async def test_a_model_that_nobody_served_is_each_samples_error(judges: ServedRewards) -> None:
    other = JudgeOptions(model="nobody", template="{completion}")
    first, second = await judges.score("judge", other, [PLAIN, PLAIN])
    assert first == second and first.value is None and "no model and no adapter 'nobody'" in first.error


@pytest.mark.parametrize(("owner", "values"), [("acme", [0.5]), (ADMINS, [0.5]), ("bobs", [None])])
async def test_a_judge_whose_name_has_become_another_tenant_s_judges_no_job(
    redis: Redis, redis_url: str, owner: str, values: list[float | None]
) -> None:
    await register(redis)
    status = WorkerStatus("w1", MODEL, "host", 1, "ready", 0, 8, 0, 0, 1, 0.0, 0, 1, 2**40)
    await WorkerRegistry(redis).heartbeat(status)
    await publish(AdapterStore(redis, who_asks=lambda: Asker("acme", limited=True)), "hers", base="base")
    reward = RewardSpec("judge", {"model": "hers", "template": "{completion}", "marks": {"0": 0.0, "1": 1.0}})
    blocking = connect(redis_url, blocking=True)
    with context(redis, blocking) as ticking:
        async with working(FakeWorker(redis, answering)):
            asked = spec("rollout", reward=msgspec.to_builtins(reward), tenant=owner)
            job, _ = await JobStore(redis).create(asked, prompts(1))
            await advance(ticking, job)
            ((_, line),) = await JobStore(redis).results(job)
        await ticking.served.close()
    await blocking.aclose()
    found = msgspec.json.decode(line, type=Trajectory).reward
    assert found is not None and [found.value] == values, found.error


async def test_a_sample_without_what_the_template_wants_is_an_error_of_its_own(
    redis: Redis, judges: ServedRewards
) -> None:
    wanting = JudgeOptions(model=MODEL, template="{prompt} {completion} {reference}", marks={"0": 0.0, "1": 1.0})
    samples = [RewardSample("a", "r", "p"), RewardSample("a", None, "p"), RewardSample("a", "r")]
    async with working(FakeWorker(redis, answering)):
        good, bare, unasked = await judges.score("judge", wanting, samples, within_s=HANG_S)
    assert good.value == 0.5
    assert (bare.value, unasked.value) == (None, None)
    assert "wants a reference" in bare.error and "wants a prompt" in unasked.error


async def test_a_client_that_leaves_takes_its_judge_along(redis_url: str) -> None:
    body = {"completions": ["x"], "reward": {"name": "judge", "model": SCRIPTED, "template": "{completion}"}}
    redis = connect(redis_url)
    async with scripted(redis_url, lambda spec: Answer()) as worker, api(redis_url) as server:
        worker.paused = True
        asking = asyncio.create_task(server.http.post("/v1/rewards/score", json=body))
        await wait_until(lambda: _states(redis, b"queued"))
        asking.cancel()
        await wait_until(lambda: _states(redis, b"cancelled"))
    await redis.aclose()


async def _states(redis: Redis, wanted: bytes) -> bool:
    found = [await redis.hget(key, "state") async for key in redis.scan_iter(keys.sequence(SCRIPTED, "reward-*"))]
    return len(found) == 5 and set(found) == {wanted}


async def test_a_job_is_cancelled_while_its_judge_thinks(redis: Redis, redis_url: str) -> None:
    await register(redis)
    blocking = connect(redis_url, blocking=True)
    reward = {"name": "judge", "options": {"model": MODEL, "template": "{completion}"}}
    job, _ = await JobStore(redis).create(spec("rollout", reward=reward), prompts(1))
    worker = FakeWorker(redis, lambda sequence: None if sequence.kind == "score" else "7")
    with context(redis, blocking) as runner:
        async with working(worker):
            running = asyncio.create_task(advance(runner, job))
            await wait_until(lambda: len(worker.busy) == 5)
            await JobStore(redis).cancel(job)
            await asyncio.wait_for(running, HANG_S)
            await wait_until(lambda: not worker.busy)
        await runner.served.close()
    status = await JobStore(redis).status(job)
    assert (status.status, status.counts.succeeded, status.mean_reward) == ("cancelled", 1, None)
    await blocking.aclose()


def test_the_registry_refuses_a_judge_in_the_pool() -> None:
    with pytest.raises(ValueError, match="no function computes"):
        load("judge")
