"""Workers in control groups: a model that does not fit is refused, and memory that runs short ends no worker."""

import asyncio
import contextlib
import os
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.machine.linux import GROUPS
from tests.e2e.rings import MODEL, Process, Ring, ring
from tests.waiting import HANG_S, wait_until

MIB = 1 << 20
ENOUGH, TOO_LITTLE = 700 * MIB, 330 * MIB


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A control group of either version with a memory limit; skips where none can be made."""
    versions = ((GROUPS / "memory", "memory.limit_in_bytes"), (GROUPS, "memory.max"))
    base, name = next(((base, name) for base, name in versions if (base / "cgroup.procs").exists()), versions[0])
    folder = base / f"parallm-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / name).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"needs control groups of memory that can be made: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


@contextlib.contextmanager
def joined(folder: Path) -> Iterator[None]:
    """Processes that are started meanwhile begin in the group."""
    ours = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if _is_of_memory(line))
    home = folder.parent / ours.split(":", 2)[2].lstrip("/") / "cgroup.procs"
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        home.write_text(str(os.getpid()))


def _is_of_memory(line: str) -> bool:
    number, controllers, _ = line.split(":", 2)
    version_1 = (GROUPS / "memory" / "cgroup.procs").exists()
    return "memory" in controllers.split(",") if version_1 else number == "0"


def start_worker(served: Ring, folder: Path, *arguments: str) -> Process:
    return Process.start(
        "worker", "--redis", served.redis_url, "--model", f"models/{MODEL}", "--adapter-cache-dir", str(folder),
        *arguments,
    )  # fmt: skip


@pytest.fixture(scope="module")
def workerless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with ring(tmp_path_factory.mktemp("ring"), "--workers", "0") as started:
        yield started


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's control groups")
def test_the_limit_of_a_control_group_decides_whether_a_model_fits(workerless: Ring, tmp_path: Path) -> None:
    with memory_group(TOO_LITTLE) as group:
        with joined(group):
            refused = start_worker(workerless, tmp_path, "--engine-stall-s", "600")
        assert refused.wait() == 2
        refused.stop()
        assert f"({group})" in refused.output and "does not fit into memory: it needs" in refused.output
    with memory_group(ENOUGH) as group:
        with joined(group):
            served = start_worker(workerless, tmp_path, "--engine-stall-s", "600")
        try:
            served.wait_for_line("worker.ready")
            (status,) = workerless.workers()
            assert status.machine.memory_total <= ENOUGH
            assert 0 < status.kv_limit_bytes < ENOUGH // 2
        finally:
            served.stop()


def test_a_limit_of_the_users_decides_alone(workerless: Ring, tmp_path: Path) -> None:
    refused = start_worker(workerless, tmp_path, "--memory-limit", "0.2")
    assert refused.wait() == 2
    refused.stop()
    assert "room for 0.2 GB of 0.2 GB (--memory-limit)" in refused.output
    served = start_worker(workerless, tmp_path, "--memory-limit", "1")
    try:
        served.wait_for_line("worker.ready")
        (status,) = workerless.workers()
        assert 0 < status.kv_limit_bytes < 10**9 // 2
    finally:
        served.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's control groups")
async def test_memory_that_runs_short_costs_rows_and_no_worker(workerless: Ring, tmp_path: Path) -> None:
    with memory_group(ENOUGH) as group:
        with joined(group):
            served = start_worker(workerless, tmp_path, "--engine-stall-s", "600")
        hog: Process | None = None
        try:
            served.wait_for_line("worker.ready")
            async with httpx.AsyncClient(base_url=workerless.url, timeout=HANG_S) as client:
                before = [await completion(client, seed) for seed in range(3)]
                asked = [asyncio.create_task(completion(client, seed)) for seed in range(3)]
                with joined(group):
                    hog = Process.start("tests.e2e.memory_hog", str(group), "0.02")
                await asyncio.to_thread(hog.wait_for_line, "taken")
                asked += [asyncio.create_task(completion(client, seed)) for seed in range(3)]

                async def is_short() -> bool:  # everywhere; freed caches may end it for a moment
                    health = (await client.get("/health")).json()
                    machine, figures = health["workers"][0]["machine"], (await client.get("/metrics")).text
                    return (
                        any("memory pressure is critical" in reason for reason in health["reasons"])
                        and machine["pressure"] == "critical"
                        and machine["most_rows"] < 32
                        and bool(re.search(r"mlx_parallm_worker_memory_pressure{[^}]*} 2", figures))
                        and "memory pressure is critical" in (await client.get("/dashboard")).text
                    )

                await wait_until(is_short)
                await asyncio.to_thread(hog.stop)
                assert await asyncio.gather(*asked) == [*before, *before]

                async def is_over() -> bool:
                    health = (await client.get("/health")).json()
                    return health["workers"][0]["machine"]["most_rows"] == -1

                await wait_until(is_over)
            assert served.popen.poll() is None, served.output
            (status,) = await asyncio.to_thread(workerless.workers)
            assert status.pid == served.popen.pid
        finally:
            if hog is not None:
                hog.stop()
            served.stop()


async def completion(client: httpx.AsyncClient, seed: int) -> str:
    """Text of a sampled completion that takes a while."""
    asked = {"model": MODEL, "prompt": f"{seed}+1=", "max_tokens": 600, "temperature": 1, "seed": seed}
    reply = await client.post("/v1/completions", json={**asked, "ignore_eos": True})
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text
