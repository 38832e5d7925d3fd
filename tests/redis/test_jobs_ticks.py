"""Ticks against a real server and a scripted worker: whole jobs, run by hand, tick by tick."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from shared.jobs import TERMINAL, JobInput, JobSpec, JobStatus, RewardSpec
from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.jobs.ledger import JobLedger, SampleRecord
from shared.redis.jobs.store import JobStore
from shared.redis.jobs.ticks import enqueue_tick
from shared.redis.queue.sequence_queue import SequenceQueue
from shared.seeds import seed_in_job
from shared.sequences import SequenceSpec
from shared.trajectories import Trajectory
from tests.redis.job_fakes import MODEL, FakeWorker, codec, context, echo, lines, prompts, register, spec, working
from tests.waiting import HANG_S, NEVER_S, wait_until
from worker.jobs import runner as runner_module
from worker.jobs import work
from worker.jobs.context import TickContext
from worker.jobs.tick import tick


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    await register(client)
    yield client
    await client.aclose()


@pytest.fixture
async def runner(redis: Redis, redis_url: str) -> AsyncIterator[TickContext]:
    blocking = connect(redis_url, blocking=True)
    with context(redis, blocking) as made:
        yield made
    await blocking.aclose()


async def submit(redis: Redis, inputs: list[bytes], job: JobSpec) -> str:
    return (await JobStore(redis).create(job, inputs))[0]


async def advance(runner: TickContext, job: str) -> JobStatus:
    """Run ticks until the job has ended, as arq would."""
    until = time.monotonic() + HANG_S
    while True:
        status = await JobStore(runner.redis).status(job)
        if status.status in TERMINAL:
            return status
        assert time.monotonic() < until, status
        number = int(await runner.redis.hget(keys.job(job), "tick") or 0)  # type: ignore[misc]
        await tick(runner, job, number)


async def trajectories(redis: Redis, job: str) -> list[Trajectory]:
    found = await JobStore(redis).results(job, limit=10_000)
    return [msgspec.json.decode(line, type=Trajectory) for _, line in found]


@pytest.mark.cluster
async def test_a_rollout_from_submission_to_rewards(redis: Redis, runner: TickContext) -> None:
    job = await submit(redis, prompts(40), spec("rollout", n=4, reward={"name": "exact"}, sampling={"seed": 7}))
    async with working(FakeWorker(redis)):
        status = await advance(runner, job)
    assert (status.status, status.counts.succeeded, status.mean_reward) == ("succeeded", 160, 1.0)
    assert status.complete_through == 160
    assert status.started_ms >= status.created_ms and status.finished_ms >= status.started_ms
    found = await trajectories(redis, job)
    assert [(t.prompt_index, t.sample_index) for t in found] == [(p, s) for p in range(40) for s in range(4)]
    last = found[-1]
    assert (last.text, last.finish_reason, last.worker) == ("39", "stop", "w1")
    assert codec().decode(last.prompt_ids) == "prompt 39"
    assert last.reward is not None and last.reward.value == 1.0
    assert len({t.seed for t in found}) == 160
    assert last.seed == seed_in_job(7, 39, 3)
    assert not await redis.exists(keys.finished(MODEL, job), keys.job_lease(job))


async def test_a_window_bounds_what_is_in_the_queue(redis: Redis, runner: TickContext) -> None:
    job = await submit(redis, prompts(400), spec())
    worker = FakeWorker(redis, rows=8)
    async with working(worker):
        await advance(runner, job)
    assert worker.most_waiting <= runner.window
    assert Counter(worker.seen).most_common(1)[0][1] == 1


async def test_a_group_is_enqueued_whole_even_beyond_the_window(redis: Redis, runner: TickContext) -> None:
    job = await submit(redis, prompts(3), spec(n=100))
    async with working(FakeWorker(redis)):
        assert (await advance(runner, job)).counts.succeeded == 300


async def test_impossible_prompts_fail_alone(redis: Redis, runner: TickContext) -> None:
    inputs = lines(
        [
            JobInput("good 1"),
            JobInput("x" * 600),
            JobInput(""),
            JobInput([5, 999]),
            JobInput([{"role": "user", "content": "chat 2"}]),
            JobInput([1, {"role": "user"}]),
            JobInput([3, 4], metadata={"id": "ids"}),
        ]
    )
    job = await submit(redis, inputs, spec(n=2))
    async with working(FakeWorker(redis)):
        status = await advance(runner, job)
    assert (status.status, status.counts.succeeded, status.counts.failed) == ("succeeded", 6, 8)
    errors = [t.error for t in (await trajectories(redis, job))[::2]]
    assert errors[0] == errors[4] == errors[6] == ""
    for index, word in ((1, "context_length_exceeded"), (2, "empty_prompt"), (3, "token_out_of_range"), (5, "both")):
        assert word in errors[index]
    last = (await trajectories(redis, job))[-1]
    assert (last.prompt_ids, last.metadata) == ((3, 4), {"id": "ids"})


async def test_an_unknown_model_fails_the_job(redis: Redis, runner: TickContext) -> None:
    job = await submit(redis, prompts(3), spec(model="nobody"))
    status = await advance(runner, job)
    assert (status.status, status.counts.failed) == ("failed", 3)
    assert "'nobody'" in status.error


async def test_scoring_gives_the_completion_s_logprobs(redis: Redis, runner: TickContext) -> None:
    inputs = lines([JobInput("2+2=", "4", "4"), JobInput([9, 9], None, [7, 8, 9]), JobInput("x", None, "")])
    job = await submit(redis, inputs, spec("score"))
    async with working(FakeWorker(redis)):
        status = await advance(runner, job)
    assert (status.status, status.counts.succeeded, status.counts.failed) == ("succeeded", 2, 1)
    first, second, third = await trajectories(redis, job)
    assert (first.text, first.logprobs, len(first.completion_ids)) == ("4", (-0.25,), 1)
    assert (second.completion_ids, second.logprobs) == ((7, 8, 9), (-0.25,) * 3)
    assert "empty_prompt" in third.error


async def test_rewarding_given_texts_needs_no_model(redis: Redis, runner: TickContext) -> None:
    inputs = lines(JobInput("2+2=", "4", str(i)) for i in range(300))
    fields = {"model": "nobody", "score_logprobs": False, "reward": {"name": "exact"}}
    job = await submit(redis, inputs, spec("score", **fields))
    status = await advance(runner, job)
    assert (status.status, status.counts.succeeded) == ("succeeded", 300)
    assert status.mean_reward == pytest.approx(1 / 300)


async def test_a_reward_that_fails_marks_its_sample(redis: Redis, runner: TickContext) -> None:
    inputs = lines([JobInput("say 1", "1"), JobInput("say 2", "none")])
    job = await submit(redis, inputs, spec("rollout", reward={"name": "gsm8k"}))
    async with working(FakeWorker(redis)):
        status = await advance(runner, job)
    assert (status.status, status.counts.succeeded, status.reward_errors, status.mean_reward) == ("succeeded", 2, 1, 1)
    bad = (await trajectories(redis, job))[1]
    assert bad.reward is not None and bad.reward.value is None and bad.reward.error


async def test_rewards_whose_sum_would_be_no_number_are_errors_and_the_job_ends(
    redis: Redis, runner: TickContext
) -> None:
    parts = [{"name": "length", "weight": 1e308, "options": {"target": 1000}}, {"name": "format", "weight": 0.0}]
    reward = {"name": "weighted", "options": {"parts": parts}}
    job = await submit(redis, prompts(4), spec("rollout", n=8, reward=reward))
    async with working(FakeWorker(redis, lambda sequence: "9")):
        status = await advance(runner, job)
    assert (status.status, status.counts.succeeded, status.reward_errors) == ("succeeded", 32, 32)
    ((_, line), *_) = await JobStore(redis).results(job)
    said = msgspec.json.decode(line, type=Trajectory).reward
    assert said is not None and "1e+100 is the largest" in said.error


@pytest.mark.cluster
async def test_two_runners_on_one_job_record_each_sample_once(redis: Redis, redis_url: str) -> None:
    """Even without the lease: what makes it right is that every step is repeatable."""
    job = await submit(redis, prompts(300), spec("generate"))
    await redis.hset(keys.job(job), "state", "running")  # type: ignore[misc]
    stored = await JobStore(redis).spec(job)
    blocking = connect(redis_url, blocking=True)

    async def run(name: str) -> None:
        with context(redis, blocking, name) as runner:
            await (await work.JobWork.on(runner, stored)).advance(time.monotonic() + HANG_S)

    worker = FakeWorker(redis)
    async with working(worker):
        await asyncio.gather(run("a"), run("b"), run("c"))
    await blocking.aclose()
    status = await JobStore(redis).status(job)
    assert (status.status, status.counts.succeeded, status.usage.completion_tokens) == ("succeeded", 300, 790)
    assert Counter(worker.seen).most_common(1)[0][1] == 1


async def test_cancelling_keeps_what_is_done(redis: Redis, runner: TickContext) -> None:
    def some(sequence: SequenceSpec) -> str | None:
        return echo(sequence) if int(sequence.id.rpartition("-")[2]) < 10 else None

    job = await submit(redis, prompts(200), spec())
    async with working(FakeWorker(redis, some, rows=20)):
        ending = asyncio.create_task(advance(runner, job))
        await wait_until(lambda: _recorded(redis, job, 10))
        assert (await JobStore(redis).cancel(job)).status in {"running", "cancelled"}
        status = await ending
    assert (status.status, status.counts.succeeded, status.counts.cancelled) == ("cancelled", 10, 190)
    found = await trajectories(redis, job)
    assert [t.text for t in found[:10]] == [str(i) for i in range(10)]
    partial = [t for t in found if t.text == "part"]
    assert len(partial) >= 10  # the rows that were running hand in what they have
    assert {t.finish_reason for t in found[10:]} == {"cancelled"}
    assert (await SequenceQueue(redis, MODEL).depth())["batch"].waiting == 0
    assert not await redis.exists(keys.finished(MODEL, job))


async def test_a_deadline_expires_the_job(redis: Redis, runner: TickContext) -> None:
    job = await submit(redis, prompts(100), spec(deadline_ms=int(1000 * (time.time() + NEVER_S))))
    async with working(FakeWorker(redis, lambda s: echo(s) if s.id.endswith("-0") else None, rows=8)):
        ending = asyncio.create_task(advance(runner, job))
        await wait_until(lambda: _recorded(redis, job, 1))
        deadline = int(time.time() * 1000)
        now_over = msgspec.structs.replace(await JobStore(redis).spec(job), deadline_ms=deadline)
        await redis.hset(keys.job(job), "spec", msgspec.json.encode(now_over))  # type: ignore[misc]
        status = await ending
    assert status.status == "expired" and "deadline" in status.error
    assert status.counts.succeeded == 1
    counts = status.counts
    assert counts.succeeded + counts.cancelled + counts.expired == 100
    assert status.finished_ms >= deadline


async def test_a_full_queue_loses_nothing(redis: Redis, runner: TickContext, monkeypatch: Any) -> None:
    queue = SequenceQueue(redis, MODEL, max_waiting={"batch": 10})
    monkeypatch.setattr(runner, "queue", lambda model: queue)
    monkeypatch.setattr(work, "BATCH", 6)
    prepared, prepare = list[int](), work.prepare
    monkeypatch.setattr(work, "prepare", lambda index, *rest: prepared.append(index) or prepare(index, *rest))
    job = await submit(redis, prompts(60), spec(n=3))
    async with working(FakeWorker(redis, rows=4)):
        assert (await advance(runner, job)).counts.succeeded == 180
    assert sorted(prepared) == list(range(60)), "a prompt is prepared once, however often there is no room"


async def test_prompts_stay_no_longer_than_their_job(redis: Redis, runner: TickContext, monkeypatch: Any) -> None:
    monkeypatch.setattr("worker.jobs.context.UNUSED_S", 0.0)
    settled, left = await submit(redis, prompts(5), spec()), await submit(redis, prompts(5), spec())
    async with working(FakeWorker(redis)):
        await advance(runner, settled)
    await tick(runner, left, 0)  # and from here on another runner has it
    assert runner.prompts.get(settled, 0) is None and runner.prompts.get(left, 0) is not None
    runner.rewarding(await JobStore(redis).spec(await submit(redis, prompts(1), spec())))
    assert runner.prompts.get(left, 0) is None


async def test_results_can_be_read_while_the_job_runs(redis: Redis, runner: TickContext) -> None:
    held = {"value": True}

    def answer(sequence: SequenceSpec) -> str | None:
        ordinal = int(sequence.id.rpartition("-")[2])
        return None if ordinal == 5 and held["value"] else echo(sequence)

    job = await submit(redis, prompts(30), spec())
    store = JobStore(redis)
    async with working(FakeWorker(redis, answer)):
        ending = asyncio.create_task(advance(runner, job))
        await wait_until(lambda: _recorded(redis, job, 29))
        assert [o for o, _ in await store.results(job, complete_only=True)] == [0, 1, 2, 3, 4]
        assert 5 not in [o for o, _ in await store.results(job)]
        held["value"] = False
        await ending
    assert [o for o, _ in await store.results(job, 4, complete_only=True)] == list(range(5, 30))


async def test_sequences_that_redis_lost_are_enqueued_again(
    redis: Redis, runner: TickContext, monkeypatch: Any
) -> None:
    monkeypatch.setattr(work, "REPAIR_AFTER_S", 0.3)
    job = await submit(redis, prompts(20), spec())
    await tick(runner, job, 0)
    assert (await JobStore(redis).status(job)).counts.running == 20
    for key in [key async for key in redis.scan_iter(f"parallm:{{{MODEL}}}:*") if b":seq:" in key or b":queue:" in key]:
        await redis.delete(key)
    async with working(FakeWorker(redis)):
        assert (await advance(runner, job)).counts.succeeded == 20


TEXTS = {"model": "nobody", "score_logprobs": False}


@pytest.mark.parametrize("fields", [{}, TEXTS], ids=["sequences", "texts"])
@pytest.mark.parametrize("is_written", [False, True])
async def test_samples_that_redis_goes_away_over_are_recorded(
    redis: Redis, runner: TickContext, monkeypatch: Any, fields: dict[str, Any], is_written: bool
) -> None:
    record, breaks = JobLedger.record, [True]

    async def broken(self: JobLedger, job_id: str, records: list[SampleRecord]) -> int:
        if not records or not breaks:
            return await record(self, job_id, records)
        breaks.clear()
        if is_written:
            await record(self, job_id, records)
        raise ConnectionError("Connection closed by server.")

    monkeypatch.setattr(JobLedger, "record", broken)
    job = await submit(redis, prompts(20), spec("score" if fields else "rollout", reward={"name": "exact"}, **fields))
    async with working(FakeWorker(redis)):
        with pytest.raises(ConnectionError):
            await advance(runner, job)
        status = await advance(runner, job)
    assert (status.status, status.counts.succeeded) == ("succeeded", 20) and not breaks
    assert len(await trajectories(redis, job)) == 20


@pytest.mark.parametrize("fields", [{}, TEXTS], ids=["sequences", "texts"])
async def test_samples_that_redis_forgets_are_read_again(
    redis: Redis, runner: TickContext, monkeypatch: Any, fields: dict[str, Any]
) -> None:
    keep, lost = work.JobWork.keep, list[SampleRecord]()

    async def losing(self: work.JobWork, records: list[SampleRecord], entries: Sequence[bytes] = ()) -> None:
        """As when a primary dies before its replicas have what it took."""
        if lost or not records:
            await keep(self, records, entries)
        else:
            lost.extend(records)

    monkeypatch.setattr(work.JobWork, "keep", losing)
    monkeypatch.setattr(work, "REPAIR_AFTER_S", 0.3)
    job = await submit(redis, prompts(20), spec("score" if fields else "rollout", reward={"name": "exact"}, **fields))
    async with working(FakeWorker(redis)):
        status = await advance(runner, job)
    assert (status.status, status.counts.succeeded) == ("succeeded", 20) and lost


async def test_a_job_whose_ticks_always_raise_fails_with_the_reason(
    redis: Redis, runner: TickContext, monkeypatch: Any
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("of our own making")

    monkeypatch.setattr(work.JobWork, "advance", broken)
    job = await submit(redis, prompts(1), spec())
    status = await advance(runner, job)
    assert status.status == "failed" and "of our own making" in status.error


async def test_a_tick_that_outlives_its_mark_runs_once_and_is_not_called_failed(
    redis: Redis, runner: TickContext, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[str] = []
    held = asyncio.Event()

    async def long_tick(context: TickContext, job: str, number: int) -> None:
        begun.append(job)
        await held.wait()

    monkeypatch.setattr(runner_module, "tick", long_tick)
    worker = runner_module.RunnerWorker(runner, 4)
    worker.in_progress_timeout_s = 0.05
    await enqueue_tick(redis, "job-a", 0)
    running = asyncio.create_task(worker.async_run())
    await wait_until(lambda: bool(begun))
    await wait_until(lambda: _gone(redis, "arq:in-progress:job-a:0"))
    await enqueue_tick(redis, "job-b", 0)  # seen by a later look at the queue, where the first one stands still
    await wait_until(lambda: "job-b" in begun)
    held.set()
    await wait_until(lambda: _gone(redis, "arq:parallm"))
    running.cancel()
    await asyncio.gather(running, *worker.tasks.values(), return_exceptions=True)
    assert begun == ["job-a", "job-b"]
    assert "failed" not in caplog.text


async def test_only_waiting_jobs_are_swept(redis: Redis) -> None:
    ledger = JobLedger(redis)
    jobs = [await submit(redis, prompts(1), spec()) for _ in range(3)]
    await ledger.begin(jobs[0], "r", 0)
    await ledger.finish(jobs[1], "failed")
    assert await ledger.active() == [(jobs[0], 1, True, False), (jobs[1], 0, False, True), (jobs[2], 0, False, False)]


@pytest.mark.cluster
async def test_what_an_ended_job_left_in_flight_is_settled_though_its_runner_died(
    redis: Redis, runner: TickContext
) -> None:
    """It died after the job's end was written; and a worker that was frozen meanwhile hands in what it has."""
    job = await submit(redis, prompts(4), spec())
    held = FakeWorker(redis, lambda _: None, rows=2)
    async with working(held):
        ticking = asyncio.create_task(advance(runner, job))
        await wait_until(lambda: len(held.busy) == 2)
    ticking.cancel()  # as a kill, so no lease is given back
    await asyncio.gather(ticking, return_exceptions=True)
    ledger = JobLedger(redis)
    await ledger.finish(job, "cancelled")
    await redis.delete(keys.job_lease(job))
    sweeping = asyncio.create_task(runner_module.RunnerWorker(runner, 4).sweep())
    await wait_until(lambda: _settled(ledger))
    sweeping.cancel()
    await asyncio.gather(sweeping, return_exceptions=True)
    assert not await redis.exists(keys.finished(MODEL, job))
    async with working(held):  # it goes on
        await wait_until(lambda: _none_alive(runner, [f"{job}-{ordinal}" for ordinal in range(4)]))
    assert not await redis.exists(keys.finished(MODEL, job)), "a late end made it anew"
    assert (await JobStore(redis).status(job)).counts.cancelled == 4


async def _none_alive(runner: TickContext, sequences: list[str]) -> bool:
    return not any([await runner.queue(MODEL).is_alive(each) for each in sequences])


async def _settled(ledger: JobLedger) -> bool:
    return await ledger.active() == []


async def _gone(redis: Redis, key: str) -> bool:
    return not await redis.exists(key)


async def _recorded(redis: Redis, job: str, samples: int) -> bool:
    return (await JobLedger(redis).progress(job)).recorded >= samples


def test_reward_options_travel_with_the_job() -> None:
    job = spec("rollout", reward={"name": "length", "options": {"target": 3}})
    assert job.reward == RewardSpec("length", {"target": 3})
