"""A full worker makes room for interactive requests: rows of jobs go back to the queue, and lose nothing by it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.rings import MODEL, Ring, ring
from tests.waiting import HANG_S, wait_until

STREAM = {"model": MODEL, "prompt": [7, 8, 9], "max_tokens": 1900, "ignore_eos": True, "stream": True}
JOB = {
    "kind": "generate",
    "model": MODEL,
    "prompts": [[5, 6], [8, 9]],
    "max_tokens": 2000,
    "ignore_eos": True,
    "seed": 3,
}


async def submitted(http: httpx.AsyncClient) -> str:
    return str((await http.post("/v1/jobs", json=JOB)).raise_for_status().json()["id"])


async def status(http: httpx.AsyncClient, job: str) -> Any:
    return (await http.get(f"/v1/jobs/{job}")).raise_for_status().json()


async def completions(http: httpx.AsyncClient, job: str) -> list[list[int]]:
    async def is_done() -> bool:
        return bool((await status(http, job))["status"] == "succeeded")

    await wait_until(is_done)
    lines = (await http.get(f"/v1/jobs/{job}/results")).raise_for_status()
    return [line["completion_ids"] for line in map(json.loads, lines.text.splitlines())]


async def beside_a_full_batch(served: Ring) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=HANG_S) as http:
        job = await submitted(http)

        async def is_full() -> bool:
            return bool((await http.get("/health")).json()["models"][MODEL]["leased"]["batch"] == 2)

        await wait_until(is_full)
        streaming, enough = asyncio.Semaphore(0), asyncio.Event()

        async def stream() -> None:
            async with http.stream("POST", "/v1/completions", json=STREAM) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        break
                streaming.release()
                await enough.wait()

        streams = [asyncio.create_task(stream()) for _ in range(3)]  # two rows are kept for them, the third is a job's
        for _ in streams:
            await streaming.acquire()
        assert (await status(http, job))["counts"]["succeeded"] == 0, "nobody waited for the end of a row"
        enough.set()
        await asyncio.gather(*streams)
        disturbed = await completions(http, job)
        assert [len(tokens) for tokens in disturbed] == [2000, 2000]
        assert disturbed == await completions(http, await submitted(http)), "tokens are those of an undisturbed run"
    assert served.server.printed("worker.made_room")


def test_an_interactive_request_gets_the_row_of_a_job_that_goes_on_later(tmp_path: Path) -> None:
    with ring(tmp_path, "--max-batch-size", "4") as served:
        asyncio.run(beside_a_full_batch(served))
