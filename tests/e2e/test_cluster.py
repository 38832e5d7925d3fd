"""Real processes on a Redis Cluster: primaries of shards are killed in mid-work, and the work goes on at successors."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from api.cli.client import InferenceClient
from shared.redis import keys
from tests.e2e.rings import MODEL, PASSWORD, Ring, two_workers_over
from tests.e2e.test_deaths import LONG, chunks, job, places, results_of
from tests.redis.clusters import Cluster
from tests.waiting import HANG_S


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("shards"), replicas=True, password=PASSWORD)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def two_workers(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with two_workers_over(cluster.url, tmp_path_factory.mktemp("ring")) as started:
        yield started


async def test_a_stream_and_a_job_go_on_when_shards_lose_their_primaries(cluster: Cluster, two_workers: Ring) -> None:
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
                    failing = asyncio.create_task(cluster.fail_over(keys.queue(MODEL, "interactive")))
        assert failing is not None
        first = await failing
        await asyncio.to_thread(cluster.restart, first)
        await cluster.until(lambda: cluster.whole() and cluster.in_step())
        second = await cluster.fail_over(keys.job(submitted.id))
        status = await client.wait(submitted.id)
        lines = await results_of(client, submitted.id)
        assert (await http.get("/metrics")).status_code == 200
        assert ", 3 shards" in (await http.get("/dashboard")).text
    assert second.popen.poll() is not None, "it was killed"
    assert text == whole
    assert status.status == "succeeded" and status.counts.succeeded == 96
    assert places(lines) == [(p, s) for p in range(24) for s in range(4)]
    assert all(len(line.completion_ids) == len(line.logprobs) == 160 for line in lines)
