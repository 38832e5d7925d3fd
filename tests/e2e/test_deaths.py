"""Real processes are killed in mid-work; from outside, nothing is lost and nothing doubled."""

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from pathlib import Path

import httpx
import pytest

from api.cli.client import InferenceClient, JobRequest
from api.serve.embedded_redis import EmbeddedRedis
from shared.jobs import JobInput, JobStatus, RewardSpec
from shared.redis import keys
from shared.redis.connection.client import connect
from shared.trajectories import Trajectory
from tests.e2e.rings import MODEL, Process, Ring, ring
from tests.redis.outages import write_at_once
from tests.waiting import HANG_S, wait_until

LONG = {"model": MODEL, "prompt": "Count from 1 to 60.", "max_tokens": 900, "ignore_eos": True, "seed": 5}


def job(prompts: int, n: int, max_tokens: int) -> tuple[JobRequest, list[JobInput]]:
    request = JobRequest(
        kind="rollout",
        model=MODEL,
        n=n,
        max_tokens=max_tokens,
        ignore_eos=True,
        seed=3,
        reward=RewardSpec("exact"),
    )
    return request, [JobInput(f"{i} + {i} = ?", str(2 * i)) for i in range(10, 10 + prompts)]


async def results_of(client: InferenceClient, job_id: str) -> list[Trajectory]:
    return [line async for line in client.results(job_id)]


def places(lines: list[Trajectory]) -> list[tuple[int, int]]:
    return [(line.prompt_index, line.sample_index) for line in lines]


async def running(served: Ring) -> Counter[str]:
    """How many sequences each worker has in hand, as Redis says: a worker's own word may be old."""
    redis = connect(served.redis_url)
    try:
        names = [name async for name in redis.scan_iter(keys.sequence(MODEL, "*"), count=1000)]
        found = [await redis.hmget(name, ["state", "worker"]) for name in names]
    finally:
        await redis.aclose()
    return Counter(worker.decode() for state, worker in found if state == b"running")


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory):
    with ring(tmp_path_factory.mktemp("ring"), "--workers", "2", "--lease-ms", "1000") as started:
        asyncio.run(wait_until(lambda: len(started.server.printed("worker.ready")) == 2))
        yield started


@pytest.fixture(scope="module")
def whole(two_workers: Ring) -> str:
    """The answer to LONG when nobody dies."""
    answer = httpx.post(f"{two_workers.url}/v1/completions", json=LONG, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


async def test_two_workers_share_a_job_and_agree_with_one_another(two_workers: Ring) -> None:
    async with InferenceClient(two_workers.url) as client:
        submitted = await client.submit(*job(prompts=24, n=4, max_tokens=48))
        status = await client.wait(submitted.id)
        lines = await results_of(client, submitted.id)
    assert status.status == "succeeded"
    assert places(lines) == [(p, s) for p in range(24) for s in range(4)]
    assert len({line.worker for line in lines}) == 2


async def test_a_stream_resumes_on_another_api_after_its_own_died(two_workers: Ring, whole: str) -> None:
    first = Process.start("api", "--port", "0", "--redis", two_workers.redis_url)
    second = Process.start("api", "--port", "0", "--redis", two_workers.redis_url)
    try:
        first_url = await asyncio.to_thread(api_url, first)
        second_url = await asyncio.to_thread(api_url, second)
        async with httpx.AsyncClient(timeout=HANG_S) as http:
            body = {**LONG, "stream": True, "stream_options": {"include_event_ids": True}}
            seen = Seen()
            with contextlib.suppress(httpx.HTTPError):
                async with http.stream("POST", f"{first_url}/v1/completions", json=body) as response:
                    async for line in response.aiter_lines():
                        seen.read(line)
                        if len(seen.text) > 200 and first.popen.poll() is None:
                            first.popen.kill()
            assert not seen.done
            async with http.stream(
                "GET", f"{second_url}/v1/streams/{seen.id}", headers={"Last-Event-ID": seen.last_event_id}
            ) as response:
                assert response.status_code == 200, await response.aread()
                async for line in response.aiter_lines():
                    seen.read(line)
        assert seen.done
        assert seen.text == whole
    finally:
        first.stop()
        second.stop()


async def anew_if_done(client: InferenceClient, submitted: JobStatus) -> JobStatus:
    """The job, or another like it: it takes a second, and one that looks may get no core for so long."""
    if (await client.status(submitted.id)).status != "succeeded":
        return submitted
    return await client.submit(*job(prompts=24, n=4, max_tokens=96))


async def test_a_killed_worker_costs_no_sample_and_doubles_none(two_workers: Ring) -> None:
    async with InferenceClient(two_workers.url) as client:
        pids = {worker.id: worker.pid for worker in await asyncio.to_thread(two_workers.workers)}
        submitted = await client.submit(*job(prompts=24, n=4, max_tokens=96))
        victims: list[int] = []

        async def holds_rows() -> bool:
            """Whether one stands still with rows in hand: on a busy machine it might be done before it is killed."""
            nonlocal submitted
            submitted = await anew_if_done(client, submitted)
            for worker, _ in (await running(two_workers)).most_common(1):
                os.kill(pids[worker], signal.SIGSTOP)
                if (await running(two_workers))[worker]:
                    victims.append(pids[worker])
                else:
                    os.kill(pids[worker], signal.SIGCONT)
            return bool(victims)

        await wait_until(holds_rows)
        os.kill(victims[0], signal.SIGKILL)
        status = await client.wait(submitted.id)
        lines = await results_of(client, submitted.id)
    assert status.status == "succeeded"
    assert status.counts.succeeded == 96
    assert places(lines) == [(p, s) for p in range(24) for s in range(4)]
    assert all(len(line.completion_ids) == len(line.logprobs) == 96 for line in lines)
    assert max(line.attempt for line in lines) >= 2, "the killed worker had nothing in hand"


async def test_a_cancelled_job_leaves_no_results_behind_though_its_workers_end_them_late(two_workers: Ring) -> None:
    """The runner waits a few seconds for frozen workers; one of them is dead when the other one looks again."""
    redis = connect(two_workers.redis_url)
    async with InferenceClient(two_workers.url) as client:
        submitted = await client.submit(*job(prompts=24, n=4, max_tokens=800))

        async def both_hold_rows() -> bool:
            return len(await running(two_workers)) == 2

        await wait_until(both_hold_rows)
        holding = await running(two_workers)  # of a worker that was killed before there may still be a heartbeat
        pids = [worker.pid for worker in await asyncio.to_thread(two_workers.workers) if worker.id in holding]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            assert len(pids) == 2 and await running(two_workers)
            await client.cancel(submitted.id)
            assert (await client.wait(submitted.id)).status == "cancelled"
            os.kill(pids[0], signal.SIGKILL)
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # the killed one
                    os.kill(pid, signal.SIGCONT)

    async def none_runs() -> bool:
        return not (await running(two_workers))

    await wait_until(none_runs)
    assert not await redis.exists(keys.finished(MODEL, submitted.id))
    await redis.aclose()


async def test_a_stream_survives_its_worker_and_shows_the_same_tokens(two_workers: Ring, whole: str) -> None:
    async with httpx.AsyncClient(base_url=two_workers.url, timeout=HANG_S) as http:
        text, killed = "", False
        async with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            async for chunk in chunks(response):
                text += "".join(choice["text"] for choice in chunk["choices"])
                if not killed and len(text) > 200:
                    killed = True
                    os.kill(await pid_of_its_worker(two_workers, chunk["id"]), signal.SIGKILL)
    assert text == whole


async def pid_of_its_worker(served: Ring, request: str) -> int:
    redis = connect(served.redis_url)
    owner = (await redis.hget(keys.sequence(MODEL, f"{request}-0"), "worker")).decode()
    await redis.aclose()
    (pid,) = {worker.pid for worker in await asyncio.to_thread(served.workers) if worker.id == owner}
    return pid


async def test_a_killed_redis_is_started_again_and_the_job_goes_on(two_workers: Ring) -> None:
    redis = connect(two_workers.redis_url)
    async with InferenceClient(two_workers.url) as client:
        submitted = await client.submit(*job(prompts=24, n=4, max_tokens=96))

        async def has_rows() -> bool:
            nonlocal submitted
            submitted = await anew_if_done(client, submitted)
            return (await client.status(submitted.id)).counts.running > 0

        write_at_once(two_workers.redis_url)
        await wait_until(has_rows)
        os.kill(int((await redis.info("server"))["process_id"]), signal.SIGKILL)
        status = await client.wait(submitted.id)
        lines = await results_of(client, submitted.id)
    await redis.aclose()
    assert status.status == "succeeded"
    assert places(lines) == [(p, s) for p in range(24) for s in range(4)]


def test_a_worker_told_to_stop_leaves_although_redis_is_silent(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        worker = Process.start(
            "worker", "--redis", server.url, "--model", f"models/{MODEL}", "--drain-grace-s", "0",
            "--adapter-cache-dir", str(tmp_path / "adapters"),
        )  # fmt: skip
        try:
            worker.wait_for_line("worker.ready")
            os.kill(server.pid, signal.SIGSTOP)
            code = worker.stop()
        finally:
            os.kill(server.pid, signal.SIGCONT)
            worker.stop(signal.SIGKILL)
    assert code == 0, worker.output


class Seen:
    """What an SSE client has seen of a text completion."""

    def __init__(self) -> None:
        self.text = self.id = self.last_event_id = self._pending_id = ""
        self.done = False

    def read(self, line: str) -> None:
        if line.startswith("id:"):
            self._pending_id = line[3:].strip()
        elif line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            chunk = json.loads(line[6:])
            self.id = chunk["id"]
            self.text += "".join(choice["text"] for choice in chunk["choices"])
            self.last_event_id = self._pending_id


async def chunks(response: httpx.Response):
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def api_url(process: Process) -> str:
    return process.wait_for_line(r"(http://127\.0\.0\.1:\d+)").group(1)


def test_nothing_is_left_running_after_the_server_was_killed(tmp_path: Path) -> None:
    server = Process.start("api.serve.main", "--model", f"models/{MODEL}", "--port", "0", "--data-dir", str(tmp_path))
    server.wait_for_line(r"ready: ")
    redis_url = server.wait_for_line(r"--redis (\S+)").group(1)
    port = int(redis_url.rsplit(":", 1)[1].split("/")[0])
    children = children_of(server.popen.pid)
    assert len(children) >= 4
    server.stop(signal.SIGKILL)

    async def gone() -> bool:
        return not any(alive(pid) for pid in children)

    asyncio.run(wait_until(gone))
    with pytest.raises(OSError):
        import socket

        socket.create_connection(("127.0.0.1", port), timeout=1)


def children_of(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def alive(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
