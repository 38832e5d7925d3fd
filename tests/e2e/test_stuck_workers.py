"""A worker whose engine is stuck or dead gives its work up, is never called healthy, and restarts."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.faulty_worker import BLOCK, DIE, FREEZE
from tests.e2e.rings import MODEL, Process, Ring, ring
from tests.waiting import wait_until

STALL_S = 2.0


@pytest.fixture(scope="module")
def workerless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with ring(tmp_path_factory.mktemp("ring"), "--workers", "0") as started:
        yield started


@contextmanager
def worker(served: Ring, folder: Path, name: str, *, module: str, parent: bool = True) -> Iterator[Process]:
    process = Process.start(
        module, "--redis", served.redis_url, "--model", f"models/{MODEL}", "--worker-id", name, "--lease-ms", "1000",
        "--engine-stall-s", str(STALL_S), "--adapter-cache-dir", str(folder),
        environment=None if parent else {"PARALLM_PARENT_PIPE": ""},
    )  # fmt: skip
    try:
        process.wait_for_line("worker.ready")
        yield process
    finally:
        process.stop()


async def told(url: str, seed: int, tokens: list[int] | None = None) -> list[int]:
    """The tokens that a client has seen when the stream ends in order."""
    body = {"model": MODEL, "prompt": "Count to 60.", "max_tokens": 60, "ignore_eos": True, "seed": seed}
    body |= {"stream": True, "return_token_ids": True}
    tokens = [] if tokens is None else tokens
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=body) as r,
    ):
        async for line in r.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                tokens += [token for choice in chunk["choices"] for token in choice.get("token_ids") or []]
    return tokens


@pytest.mark.parametrize("fault", [BLOCK, DIE, FREEZE])
async def test_a_stream_goes_on_elsewhere_when_the_engine_below_it_is(
    fault: int, workerless: Ring, tmp_path: Path
) -> None:
    with worker(workerless, tmp_path, "faulty", module="tests.e2e.faulty_worker") as faulty:
        seen: list[int] = []
        stream = asyncio.create_task(told(workerless.url, fault, seen))
        await wait_until(lambda: bool(seen), 20)
        with worker(workerless, tmp_path / "sane", "sane", module="worker"):
            tokens = await asyncio.wait_for(stream, 30)
            code = await asyncio.to_thread(faulty.popen.wait, 30)
            again = await told(workerless.url, fault)
    assert code == 1, faulty.output
    assert len(tokens) == 60
    assert tokens == again, "the tokens changed with the worker"
    reason = {BLOCK: "worker.engine_stuck", DIE: "worker.engine_died", FREEZE: "Timeout"}[fault]
    assert faulty.printed(reason), faulty.output


async def test_a_stuck_worker_is_not_reported_ready_and_a_worker_without_supervisor_restarts_itself(
    workerless: Ring, tmp_path: Path
) -> None:
    with worker(workerless, tmp_path, "alone", module="tests.e2e.faulty_worker", parent=False) as alone:
        pid = (await asyncio.to_thread(workerless.workers))[0].pid
        stream = asyncio.create_task(told(workerless.url, BLOCK))
        states: set[str] = set()

        async def restarted() -> bool:
            states.update(w.state for w in await asyncio.to_thread(workerless.workers))
            if "stuck" in states:
                stream.cancel()
            return len(alone.printed("worker.ready")) == 2

        await wait_until(restarted, 40)
        assert (await asyncio.to_thread(workerless.workers))[0].pid == pid, "it replaces itself in its process"
    assert "stuck" in states, states
