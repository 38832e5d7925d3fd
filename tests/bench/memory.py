"""Resident memory of the api over many streamed requests, and the worker's over raw mlx-lm.

`python -m tests.bench.memory [--requests 10000]`. Requests are short streams of the tiny model, 32 at a time.

`--growth N` measures leaks: the memory that api, worker and job runner have for themselves after N, 2N, 4N and 8N
requests with a prompt each, a tenth of them samples of jobs. Caches of the worker (KV, KV files, drafts) are so small
that they are full after N, so what a process gains per request after that is a leak, or the allocator's.
`--growth-learners N` does the same for a service of learners.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from api.cli.client import InferenceClient, JobRequest
from shared.jobs import JobInput
from shared.learners import LearnerSpec
from shared.redis.connection.client import connect
from shared.redis.training.learner_store import LearnerStore
from tests.bench.load import load
from tests.e2e.rings import Process, Ring, ring
from tests.e2e.served.test_learners import lessons

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}


def megabytes(processes: list[psutil.Process]) -> float:
    return sum(process.memory_info().rss for process in processes) / 1e6


def children(server: Process, module: str) -> list[psutil.Process]:
    found = psutil.Process(server.popen.pid).children(recursive=True)
    return [child for child in found if child.cmdline()[1:3] == ["-m", module]]


async def measure(url: str, server: Process, requests: int) -> None:
    api, worker = children(server, "api"), children(server, "worker")
    print(f"start            api {megabytes(api):6.1f} MB, worker {megabytes(worker):6.1f} MB")
    for done in range(0, requests, requests // 5):
        for _ in range(requests // 5 // 32):
            await load(url, "/v1/completions", [BODY] * 32)
        rss = f"api {megabytes(api):6.1f} MB, worker {megabytes(worker):6.1f} MB"
        print(f"{done + requests // 5:6d} requests  {rss}", flush=True)


SMALL_CACHES = (
    *("--prefix-cache-gb", "0.005", "--ssd-policy", "write_through", "--ssd-max-size-gb", "0.02"),
    *("--spec-decode", "auto", "--record-ttl-s", "60"),
)
JOBS_SHARE = 10  # one request of so many is a sample of a job
AT_ONCE, BLOCK = 32, 128  # streams; requests between two jobs


def growing(server: Process) -> dict[str, int]:
    """Bytes that each kind of process has for itself."""
    kinds = {"api": "api", "worker": "worker", "job runner": "worker.jobs"}
    return {
        kind: sum(process.memory_full_info().uss for process in children(server, module))
        for kind, module in kinds.items()
    }


async def burden(served: Ring, first: int, count: int) -> None:
    """Stream `count` completions with prompts from number `first` on, and jobs over some; a multiple of BLOCK."""
    async with InferenceClient(served.url) as client:
        for at in range(first, first + count, BLOCK):
            prompts = [f"{number} is a number. What is {number} + {number}?" for number in range(at, at + BLOCK)]
            for part in range(0, BLOCK, AT_ONCE):
                bodies = [BODY | {"prompt": prompt, "max_tokens": 16} for prompt in prompts[part : part + AT_ONCE]]
                await load(served.url, "/v1/completions", bodies)
            request = JobRequest(kind="generate", model="tiny", max_tokens=16)
            job = await client.submit(request, [JobInput(prompt) for prompt in prompts[::JOBS_SHARE]])
            assert (await client.wait(job.id)).status == "succeeded"


async def growth(served: Ring, requests: int) -> None:
    done, before = 0, growing(served.server)
    for total in (requests, 2 * requests, 4 * requests, 8 * requests):
        await burden(served, done, total - done)
        now = growing(served.server)
        per = {kind: (now[kind] - before[kind]) / (total - done) for kind in now}
        figures = (f"{kind} {now[kind] / 2**20:.1f} MiB, {per[kind]:+,.0f} bytes a request" for kind in now)
        print(f"{total:6d} requests  {'; '.join(figures)}", flush=True)
        done, before = total, now


async def teach(store: LearnerStore, number: int) -> None:
    """Create a learner, have it learn for some steps, and drop it."""
    asked = lessons()
    spec = LearnerSpec(id=f"l{number}", model="tiny", rank=4, scale=8.0, seed=1, adapter=f"l{number}")
    await store.create(spec)
    for at, request in enumerate(asked, 1):
        await store.place(spec, at, request)
    for at in range(1, len(asked) + 1):
        while await store.answer(spec.id, at) is None:  # noqa: ASYNC110 it is in Redis
            await asyncio.sleep(0.02)
    await store.drop("tiny", spec.id)


async def growth_of_learners(served: Ring, learners: int) -> None:
    """As `growth`, of a service of learners, one after another."""
    service = Process.start("trainer.service", "--redis", served.redis_url, "--model", "models/tiny")
    redis = connect(served.redis_url)
    try:
        await asyncio.to_thread(service.wait_for_line, "learners.ready")
        process, done = psutil.Process(service.popen.pid), 0
        before = process.memory_full_info().uss
        for total in (learners, 2 * learners, 4 * learners, 8 * learners):
            for number in range(done, total):
                await teach(LearnerStore(redis), number)
            now = process.memory_full_info().uss
            per = (now - before) / (total - done)
            print(f"{total:6d} learners  {now / 2**20:.1f} MiB, {per:+,.0f} bytes a learner", flush=True)
            done, before = total, now
    finally:
        await redis.aclose()
        await asyncio.to_thread(service.stop)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.memory", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--growth", type=int, default=0, help="requests at the first measurement")
    parser.add_argument("--growth-learners", type=int, default=0, help="learners at the first measurement")
    arguments = parser.parse_args()
    if arguments.growth_learners:
        with tempfile.TemporaryDirectory() as folder, ring(Path(folder)) as served:
            asyncio.run(growth_of_learners(served, arguments.growth_learners))
        return
    if arguments.growth:
        with (
            tempfile.TemporaryDirectory() as folder,
            ring(Path(folder), *SMALL_CACHES, "--ssd-cache-dir", f"{folder}/kv") as served,
        ):
            asyncio.run(growth(served, arguments.growth))
        return
    raw = subprocess.run(
        [sys.executable, "-m", "tests.bench.peers", "memory", "models/tiny"], capture_output=True, text=True, check=True
    ).stdout
    print(f"raw mlx-lm, 32 rows of the same model: {int(raw) / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory() as folder, ring(Path(folder)) as served:
        asyncio.run(measure(served.url, served.server, arguments.requests))


if __name__ == "__main__":
    main()
