"""POST /pause and /resume on a real ring of two workers: rows end, finish or freeze, and go on."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from api.cli.client import InferenceClient, JobRequest
from shared.jobs import JobInput
from tests.e2e.rings import MODEL, Process, Ring, ring
from tests.waiting import HANG_S, wait_until

PROMPT = [20, 30, 40]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    arguments = ("--workers", "2", "--lease-ms", "2000", "--max-batch-size", "4", "--log-every-tokens", "4")
    with ring(tmp_path_factory.mktemp("ring"), *arguments) as started:
        asyncio.run(wait_until(lambda: len(started.server.printed("worker.ready")) == 2))
        yield started


@pytest.fixture(scope="module")
def expected(server: Ring) -> list[int]:
    """What a stream says whose rows nobody disturbs."""
    (choice,) = httpx.post(f"{server.url}/v1/completions", json=body(), timeout=HANG_S).json()["choices"]
    ids: list[int] = choice["token_ids"]
    return ids


@pytest.fixture
async def http(server: Ring) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client:
        yield client
        await client.post("/resume")


class Stream:
    """A completion as its client reads it."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.ids: list[int] = []
        self.finish = ""

    async def chunk(self) -> None:
        """Read the next chunk that says something."""
        async for line in self._lines:
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                self.ids += choice.get("token_ids") or []
                self.finish = choice["finish_reason"] or ""
                return

    async def rest(self) -> list[int]:
        while not self.finish:
            await self.chunk()
        return self.ids


def body(**fields: Any) -> dict[str, Any]:
    plain = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**plain, "max_tokens": 800, **fields}


@asynccontextmanager
async def begun(http: httpx.AsyncClient, **fields: Any) -> AsyncIterator[Stream]:
    """A stream that has its first token."""
    async with http.stream("POST", "/v1/completions", json=body(stream=True, **fields)) as response:
        stream = Stream(response)
        await stream.chunk()
        yield stream


async def ids_alone(http: httpx.AsyncClient, **fields: Any) -> list[int]:
    choice = (await http.post("/v1/completions", json=body(**fields))).json()["choices"][0]
    ids: list[int] = choice["token_ids"]
    return ids


async def pause(http: httpx.AsyncClient, **query: Any) -> None:
    response = await http.post("/pause", params=query)
    assert (response.status_code, response.json()) == (200, {"status": "paused"}), response.text


async def resume(http: httpx.AsyncClient) -> None:
    assert (await http.post("/resume")).json() == {"status": "resumed"}


@pytest.mark.parametrize("clear_cache", [False, True])
async def test_kept_rows_stand_still_beyond_their_leases_and_go_on(
    server: Ring, http: httpx.AsyncClient, expected: list[int], clear_cache: bool
) -> None:
    async with begun(http) as stream:
        await pause(http, mode="keep", clear_cache=clear_cache)
        health = (await http.get("/health")).json()
        # An api that a busy machine lets stand still says so before it says that it is paused.
        assert health["paused"] == "keep" and (health["status"] == "paused" or health["reasons"]), health
        assert [worker["state"] for worker in health["workers"]] == ["paused", "paused"]
        assert sum(worker["rows"] for worker in health["workers"]) == 1
        assert (await http.get("/is_paused")).json() == {"is_paused": True, "mode": "keep"}

        waiting = asyncio.create_task(ids_alone(http, max_tokens=3))
        reading = asyncio.create_task(stream.rest())  # what was on its way arrives, then nothing for more than a lease
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await asyncio.shield(reading)
        assert 0 < len(stream.ids) < 800
        assert not waiting.done(), "new requests wait"
        await resume(http)
        assert await waiting == expected[:3]
        assert await reading == expected
    assert (await http.get("/is_paused")).json() == {"is_paused": False, "mode": None}
    assert server.server.printed("lease_lost") == server.server.printed("worker.reaped") == []


async def test_abort_ends_requests_with_what_they_have_and_jobs_go_on_after_the_resume(
    server: Ring, http: httpx.AsyncClient, expected: list[int]
) -> None:
    request = JobRequest(kind="generate", model=MODEL, n=1, max_tokens=600, ignore_eos=True, temperature=0.0)
    async with InferenceClient(server.url) as client, begun(http) as stream:
        job = await client.submit(request, [JobInput(PROMPT)])
        await wait_until(lambda: leased_batch(http))
        await pause(http)
        assert (await stream.rest(), stream.finish) == (expected[: len(stream.ids)], "abort")
        assert len(stream.ids) < 800
        assert (await client.status(job.id)).status == "running"
        await resume(http)
        assert (await client.wait(job.id)).status == "succeeded"
        (line,) = [line async for line in client.results(job.id)]
    assert (list(line.completion_ids), line.finish_reason) == (expected[:600], "length")


async def test_wait_lets_rows_finish_and_takes_no_new_ones(
    server: Ring, http: httpx.AsyncClient, expected: list[int]
) -> None:
    async with begun(http) as stream:
        pausing = asyncio.create_task(pause(http, mode="wait"))
        await wait_until(lambda: is_paused(http))
        await wait_until(
            lambda: len([line for line in server.server.printed("worker.pausing") if '"wait"' in line]) >= 2
        )
        waiting = asyncio.create_task(ids_alone(http, max_tokens=3))
        assert await stream.rest() == expected
        assert stream.finish == "length"
        await pausing
        assert not waiting.done()
        await resume(http)
        assert len(await waiting) == 3


async def test_a_worker_that_starts_during_a_pause_is_paused(server: Ring, http: httpx.AsyncClient) -> None:
    await pause(http, mode="keep")
    late = await asyncio.to_thread(
        Process.start, "worker", "--redis", server.redis_url, "--model", f"models/{MODEL}", "--worker-id", "late"
    )
    try:
        await asyncio.to_thread(late.wait_for_line, "worker.ready")
        states = {w.id: w.state for w in await asyncio.to_thread(server.workers)}
        assert (len(states), states["late"]) == (3, "paused")
        waiting = asyncio.create_task(ids_alone(http, max_tokens=3))
        await resume(http)
        assert len(await waiting) == 3
    finally:
        assert await asyncio.to_thread(late.stop) == 0


async def test_a_wrong_mode_is_refused(http: httpx.AsyncClient) -> None:
    refused = await http.post("/pause", params={"mode": "stop"})
    assert refused.status_code == 400
    assert "mode" in refused.json()["error"]["message"]
    assert not await is_paused(http)


async def leased_batch(http: httpx.AsyncClient) -> bool:
    found: int = (await http.get("/health")).json()["models"][MODEL]["leased"]["batch"]
    return found > 0


async def is_paused(http: httpx.AsyncClient) -> bool:
    paused: bool = (await http.get("/is_paused")).json()["is_paused"]
    return paused


async def test_a_reset_of_the_prefix_cache_reaches_every_worker(http: httpx.AsyncClient) -> None:
    long = [20 + at % 40 for at in range(200)]

    async def cached() -> int:
        usage = (await http.post("/v1/completions", json=body(prompt=long, max_tokens=2, user="u"))).json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    # Both workers come to know it most of the time; one of them may take all, but each that takes two does for sure.
    found = [await asyncio.gather(*(cached() for _ in range(4))) for _ in range(4)]
    assert max(map(max, found)) > 0
    answer = await http.post("/reset_prefix_cache")
    assert (answer.status_code, answer.json()["status"], len(answer.json()["workers"])) == (200, "reset", 2)
    assert await cached() == 0


async def test_rows_that_run_go_on_where_they_were_behind_a_reset(http: httpx.AsyncClient, expected: list[int]) -> None:
    async with begun(http) as stream:
        assert (await http.post("/reset_prefix_cache", params={"reset_running_requests": True})).status_code == 200
        assert await stream.rest() == expected
