"""Real `python -m worker.jobs` processes: woken by a submission, killed in the middle, stopped in order."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from api.serve.embedded_redis import EmbeddedRedis
from shared.jobs import TERMINAL, JobStatus
from shared.process.lifeline import VARIABLE
from shared.process.process_settings import RunnerSettings
from shared.process.settings import load
from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.jobs.ledger import JobLedger
from shared.redis.jobs.store import JobStore
from shared.redis.jobs.ticks import arq_redis, enqueue_tick
from shared.redis.queue.sequence_queue import ClaimPlan, SequenceQueue
from shared.sequences import SequenceSpec
from tests.redis.job_fakes import MODEL, FakeWorker, echo, prompts, register, spec, working
from tests.redis.outages import write_at_once
from tests.waiting import HANG_S, NEVER_S, wait_until
from worker.jobs import runner as runner_module

ROOT = Path(__file__).parents[2]
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    await register(client)
    yield client
    await client.aclose()


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def run(*flags: str, lifeline: bool = False) -> "subprocess.Popen[bytes]":
        log = (tmp_path / f"runner{len(started)}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "worker.jobs", "--redis", redis_url, "--reward-processes", "1", *flags],
            cwd=ROOT,
            env={**os.environ, VARIABLE: "1" if lifeline else ""},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        log.close()
        started.append(process)
        return process

    yield run
    for process in started:
        assert process.stdin is not None
        process.stdin.close()
        process.kill()
        process.wait()
    logs = [path.read_text() for path in tmp_path.glob("runner*.log")]
    assert not [text for text in logs if "Traceback" in text or "Bad file descriptor" in text], logs


async def ended(redis: Redis, job: str) -> bool:
    return (await JobStore(redis).status(job)).status in TERMINAL


async def finish(redis: Redis, job: str) -> JobStatus:
    await wait_until(lambda: ended(redis, job))
    return await JobStore(redis).status(job)


async def ready(redis: Redis) -> None:
    async def listening() -> bool:
        return bool((await redis.pubsub_numsub("arq:parallm:wake"))[0][1])

    await wait_until(listening)


async def test_a_submission_wakes_an_idle_runner(redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the fallback poll nor the sweeper would come in time."""
    monkeypatch.setattr(runner_module, "FALLBACK_POLL_S", NEVER_S)
    monkeypatch.setattr(runner_module, "SWEEP_S", NEVER_S)
    running = asyncio.create_task(runner_module.run(load(RunnerSettings, ["--redis", redis_url])))
    await ready(redis)
    async with working(FakeWorker(redis)):
        for _ in range(3):
            job, _ = await JobStore(redis).create(spec(), prompts(2))
            await finish(redis, job)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_killed_runner_s_job_is_finished_by_another_each_sample_once(redis: Redis, start: Start) -> None:
    first = start()
    job, _ = await JobStore(redis).create(spec("rollout", n=4, reward={"name": "exact"}), prompts(150))
    next_at = time.monotonic()

    def paced(sequence: SequenceSpec) -> str | None:
        nonlocal next_at
        if time.monotonic() < next_at:
            return None
        next_at = time.monotonic() + 0.004
        return echo(sequence)

    worker = FakeWorker(redis, paced, rows=16)
    async with working(worker):
        await wait_until(lambda: recorded(redis, job, 100))
        first.kill()
        first.wait()
        killed = time.monotonic()
        stopped_at = (await JobLedger(redis).progress(job)).recorded
        assert stopped_at < 600
        start()
        await wait_until(lambda: recorded(redis, job, stopped_at + 1))
        print(f"work goes on {time.monotonic() - killed:.1f} s after the kill (a new process included)")
        status = await finish(redis, job)
    assert (status.status, status.counts.succeeded, status.complete_through) == ("succeeded", 600, 600)
    assert status.mean_reward == 1.0
    assert Counter(worker.seen).most_common(1)[0][1] == 1
    assert len(await JobStore(redis).results(job, limit=1000)) == 600


async def test_a_second_runner_takes_over_within_seconds(redis: Redis, start: Start) -> None:
    runners = [start(), start()]
    job, _ = await JobStore(redis).create(spec(), prompts(10_000))
    await wait_until(lambda: leased(redis, job))
    async with working(FakeWorker(redis, rows=32)):
        await wait_until(lambda: recorded(redis, job, 200))
        owner = (await redis.get(keys.job_lease(job)) or b"").decode()
        dying = next((r for r in runners if f"-{r.pid}-" in owner), runners[0])
        dying.kill()
        dying.wait()
        before = (await JobLedger(redis).progress(job)).recorded
        killed = time.monotonic()
        await wait_until(lambda: recorded(redis, job, before + 200))
        print(f"takeover after {time.monotonic() - killed:.1f} s")
        assert (await JobStore(redis).cancel(job)).status in {"running", "cancelled"}
        assert (await finish(redis, job)).status == "cancelled"


@pytest.mark.parametrize("forgets", [False, True])
async def test_a_job_survives_a_kill_of_redis(tmp_path: Path, forgets: bool) -> None:
    """Also of one that forgets what it has acknowledged, as it may of its last second, on a slow disk of two."""
    server = EmbeddedRedis(tmp_path)
    files, older = tmp_path / "redis" / "appendonlydir", tmp_path / "older"
    url = server.start()
    write_at_once(url)
    redis = connect(url)
    await register(redis)
    runner = _popen(url)
    try:
        async with working(FakeWorker(redis, rows=32, forgets=True)):
            job, _ = await JobStore(redis).create(spec(), prompts(1500))
            await wait_until(lambda: recorded(redis, job, 100))
            shutil.copytree(files, older)
            await wait_until(lambda: recorded(redis, job, 500))
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            server.stop()
            if forgets:
                shutil.rmtree(files)
                older.rename(files)
            await asyncio.sleep(0.5)
            server = EmbeddedRedis(tmp_path, port=server.port)
            server.start()
            await lose_a_claim(redis)  # as a kill between the claim and its reply does
            status = await finish(redis, job)
        assert (status.status, status.counts.succeeded) == ("succeeded", 1500)
        assert len(await JobStore(redis).results(job, limit=4000)) == 1500
    finally:
        runner.terminate()
        runner.wait(HANG_S)
        await redis.aclose()
        server.stop()


async def test_a_runner_can_be_stopped_while_redis_is_away(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    url = server.start()
    redis = connect(url)
    runner = _popen(url)
    await ready(redis)
    await redis.aclose()
    server.stop()
    await asyncio.sleep(0.5)
    runner.terminate()
    assert await asyncio.to_thread(runner.wait, HANG_S) == 0


async def test_references_nested_too_deep_fail_their_samples_alone(redis: Redis, start: Start) -> None:
    depths = [1, *range(900, 990, 8), 2000, 1]
    job, _ = await JobStore(redis).create(spec("rollout", reward={"name": "exact"}), prompts(len(depths)))
    for i, depth in enumerate(depths):  # what one process can still read of such a line another one cannot write
        line = b'{"prompt":"say 1","reference":' + b"[" * depth + b'"1"' + b"]" * depth + b"}"
        await redis.lset(keys.job_inputs(job), i, line)  # type: ignore[misc]
    start()
    async with working(FakeWorker(redis)):
        status = await finish(redis, job)
    assert (status.status, status.counts.total) == ("succeeded", len(depths))
    assert status.reward_errors + status.counts.failed == len(depths) - 2
    assert status.mean_reward == 1.0


async def test_many_jobs_advance_side_by_side(redis: Redis, start: Start) -> None:
    start("--max-jobs", "3", "--window", "16")
    async with working(FakeWorker(redis, rows=16)):
        jobs = [(await JobStore(redis).create(spec(), prompts(60)))[0] for _ in range(12)]
        for job in jobs:
            assert (await finish(redis, job)).counts.succeeded == 60


async def test_a_stopped_runner_leaves_nothing_behind(redis: Redis, start: Start) -> None:
    runner = start()
    await ready(redis)
    job, _ = await JobStore(redis).create(spec("rollout", reward={"name": "exact"}), prompts(5))
    async with working(FakeWorker(redis)):
        await finish(redis, job)
    waiting, _ = await JobStore(redis).create(spec(), prompts(5))
    await wait_until(lambda: leased(redis, waiting))
    children = psutil.Process(runner.pid).children(recursive=True)
    runner.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(runner.wait, HANG_S) == 0
    psutil.wait_procs(children, timeout=HANG_S)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not await redis.exists(keys.job_lease(waiting))
    assert (await JobStore(redis).status(waiting)).status == "running"  # another runner goes on with it


async def test_a_runner_and_its_pool_end_with_their_parent(redis: Redis, start: Start) -> None:
    runner = start(lifeline=True)
    job, _ = await JobStore(redis).create(spec("rollout", reward={"name": "exact"}), prompts(5))
    async with working(FakeWorker(redis)):
        await finish(redis, job)
    assert runner.stdin is not None
    runner.stdin.close()
    assert await asyncio.to_thread(runner.wait, HANG_S) == 0


async def test_the_pool_ends_with_a_killed_runner(redis: Redis, start: Start) -> None:
    runner = start()
    job, _ = await JobStore(redis).create(spec("rollout", reward={"name": "exact"}), prompts(5))
    async with working(FakeWorker(redis)):
        await finish(redis, job)
    children = psutil.Process(runner.pid).children(recursive=True)
    assert children
    runner.kill()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, HANG_S)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


async def test_a_tick_waits_once_however_often_it_is_enqueued(redis: Redis) -> None:
    assert await enqueue_tick(redis, "job-a", 0)
    assert not await enqueue_tick(redis, "job-a", 0)
    assert await enqueue_tick(redis, "job-a", 1)
    (first, second) = await arq_redis(redis).queued_jobs(queue_name="arq:parallm")
    assert (first.function, first.args) == ("tick", ["job-a", 0])
    assert second.args == ["job-a", 1]
    stored = await redis.get("arq:job:job-a:0")
    assert stored is not None and b"tick" in stored and not stored.startswith(b"\x80\x04")  # no pickle


async def test_without_a_redis_the_command_says_what_to_do() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PARALLM_")}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "worker.jobs"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "--redis" in done.stderr and "Traceback" not in done.stderr


async def recorded(redis: Redis, job: str, samples: int) -> bool:
    return (await JobLedger(redis).progress(job)).recorded >= samples


async def lose_a_claim(redis: Redis) -> None:
    async def claimed() -> bool:
        return bool(await SequenceQueue(redis, MODEL).claim("w1", ClaimPlan(1, 0, 1, 1, 10**9, False)))

    await wait_until(claimed)


async def leased(redis: Redis, job: str) -> bool:
    return bool(await redis.exists(keys.job_lease(job)))


def _popen(url: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "worker.jobs", "--redis", url, "--reward-processes", "1"]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
