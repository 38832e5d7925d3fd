"""Real processes under Sentinel: the primary Redis is killed in mid-work, and the work goes on at its successor."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from api.cli.client import InferenceClient
from tests.e2e.rings import PASSWORD, Ring, two_workers_over
from tests.e2e.test_deaths import LONG, chunks, job, places, results_of
from tests.redis.sentinels import Watched
from tests.waiting import HANG_S


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    made = Watched(tmp_path_factory.mktemp("sentinel"), replicas=2, password=PASSWORD)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def two_workers(watched: Watched, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with two_workers_over(watched.url, tmp_path_factory.mktemp("ring")) as started:
        yield started


async def test_a_stream_and_a_job_go_on_at_the_new_primary(watched: Watched, two_workers: Ring) -> None:
    async with (
        httpx.AsyncClient(base_url=two_workers.url, timeout=HANG_S) as http,
        InferenceClient(two_workers.url) as client,
    ):
        whole = (await http.post("/v1/completions", json=LONG)).json()["choices"][0]["text"]
        submitted = await client.submit(*job(prompts=24, n=4, max_tokens=160))
        text, failing = "", None
        async with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            async for chunk in chunks(response):
                text += "".join(choice["text"] for choice in chunk["choices"])
                if failing is None and len(text) > 200:
                    failing = asyncio.create_task(watched.fail_over())
        status = await client.wait(submitted.id)
        lines = await results_of(client, submitted.id)
        assert failing is not None
        old = await failing
    assert old.popen.poll() is not None, "it was killed"
    assert text == whole
    assert status.status == "succeeded" and status.counts.succeeded == 96
    assert places(lines) == [(p, s) for p in range(24) for s in range(4)]
    assert all(len(line.completion_ids) == len(line.logprobs) == 160 for line in lines)


async def test_a_second_failover_finds_everybody_again(watched: Watched, two_workers: Ring) -> None:
    await watched.fail_over()
    async with InferenceClient(two_workers.url) as client:
        submitted = await client.submit(*job(prompts=4, n=2, max_tokens=16))
        status = await client.wait(submitted.id)
    assert status.status == "succeeded" and status.counts.succeeded == 8
