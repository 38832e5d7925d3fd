"""No input makes the server fail, hang, or answer in another shape (tests/e2e/bad_input.py runs longer)."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
from redis.asyncio import Redis

from api.cli.client import InferenceClient, JobRequest
from shared.frames import TokenEvent
from shared.jobs import JobInput
from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.queue.sequence_queue import SequenceQueue
from shared.sequences import SamplingParams, SequenceSpec, encode
from tests.e2e import bad_input
from tests.e2e.rings import MODEL, Ring
from tests.waiting import HANG_S, wait_until

ASK = {"model": MODEL, "prompt": "12+35=", "max_tokens": 4, "temperature": 0}


@pytest.fixture
async def redis(served: Ring) -> AsyncIterator[Redis]:
    client = connect(served.redis_url)
    yield client
    await client.aclose()


async def answers(served: Ring) -> str:
    async with httpx.AsyncClient(base_url=served.url, timeout=HANG_S) as http:
        answer = await http.post("/v1/completions", json=ASK)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]


def test_no_body_makes_the_server_fail(served: Ring) -> None:
    findings = bad_input.Findings()
    bad_input.upload(served.url)
    bad_input.raw(served.url, findings)
    bad_input.mutate(served.url, findings, examples=300)
    assert findings.wrong == []
    assert findings.answers[200] > 0, "some were right after all"
    assert findings.answers[400] > 500


def test_nothing_that_our_own_description_allows_or_forbids_makes_the_server_fail(served: Ring) -> None:
    findings = bad_input.Findings()
    bad_input.explore(served.url, findings, examples=2)
    assert findings.wrong == []
    assert findings.answers.total() > 150


async def test_huge_requests_are_refused_by_their_size(served: Ring) -> None:
    cases = {
        413: {"prompt": "x" * 10_000_000},
        400: {"stop": [f"stop {i}" for i in range(5000)]},
    }
    async with httpx.AsyncClient(base_url=served.url, timeout=HANG_S) as http:
        for status, fields in cases.items():
            answer = await http.post("/v1/completions", json=ASK | fields)
            assert (answer.status_code, answer.json()["error"]["type"] != "") == (status, True), answer.text
        answer = await http.post("/v1/completions", json=ASK | {"prompt": [10**6]})
        assert answer.json()["error"]["code"] == "token_out_of_range"


IMPOSSIBLE = [
    SamplingParams(0, 0),
    SamplingParams(-5, 0),
    SamplingParams(2**40, 0),
    SamplingParams(4, -1),
    SamplingParams(4, 2**62, temperature=float("nan")),
    SamplingParams(4, 0, temperature=float("inf"), top_p=-3.0),
    SamplingParams(4, 0, temperature=-1.0, top_k=-7, min_p=9.0),
    SamplingParams(4, 0, logit_bias={10**9: 1.0, -4: float("nan")}),
    SamplingParams(4, 0, top_logprobs=10**9),
    SamplingParams(4, 0, stop=("",) * 100, stop_token_ids=(-1, 10**12)),
    SamplingParams(4, 0, repetition_penalty=0.0, frequency_penalty=float("inf")),
]
PROMPTS = [(), (10**9,), (-1,), (1,) * 5000]


async def test_a_worker_outlives_specs_that_no_api_would_write(served: Ring, redis: Redis) -> None:
    before = await answers(served)
    queue = SequenceQueue(redis, MODEL)
    specs = [SequenceSpec(f"bad-{i}", MODEL, (5, 6), sampling) for i, sampling in enumerate(IMPOSSIBLE)]
    specs += [SequenceSpec(f"prompt-{i}", MODEL, ids, SamplingParams(4, 0)) for i, ids in enumerate(PROMPTS)]
    specs += [
        SequenceSpec("adapter", MODEL, (5,), SamplingParams(4, 0), adapter="../../etc/passwd@x"),
        SequenceSpec("model", "another", (5,), SamplingParams(4, 0)),
        SequenceSpec("score", MODEL, (5,), SamplingParams(4, 0), kind="score", score_ids=(10**9,)),
    ]
    await queue.enqueue(specs)
    await redis.hset(keys.sequence(MODEL, "bad-0"), "spec", b"\xc1")
    await redis.hset(keys.sequence(MODEL, "bad-1"), "spec", encode(msgspec.structs.replace(specs[1], schema=9)))

    async def settled() -> bool:
        states = [await redis.hget(keys.sequence(MODEL, spec.id), "state") for spec in specs]
        return all(state in (b"done", b"cancelled") for state in states)

    await wait_until(settled)
    assert await answers(served) == before
    assert len(served.server.printed("worker.ready")) == 1, "no worker was started again"


async def test_garbage_in_every_stream_and_channel_stops_nobody(served: Ring, redis: Redis) -> None:
    before = await answers(served)
    worker = (await asyncio.to_thread(served.workers))[0]
    apis = [key.decode().split("{")[1][:-1] async for key in redis.scan_iter(match="parallm:api:{*}")]
    newer = msgspec.msgpack.encode(["w", 1, [TokenEvent("x", 1, 0, [1], [-0.5])], 9])
    for garbage in (b"", b"\xc1", b"null", b"\xff" * 1000, newer, msgspec.msgpack.encode(("cancel", 5))):
        channels = [keys.control_channel(worker.id), keys.adapter_channel(), "arq:parallm:wake"]
        for channel in (*channels, *(keys.frame_channel(api) for api in apis)):
            await redis.publish(channel, garbage)
        streams = [keys.queue(MODEL, "interactive"), keys.queue(MODEL, "batch"), *(keys.frames(api) for api in apis)]
        for stream in streams:
            await redis.xadd(stream, {"d": garbage, "id": garbage})
        await redis.set(f"arq:job:{garbage.hex()}", garbage, ex=60)
        await redis.zadd("arq:parallm", {garbage.hex(): 1})
    assert await answers(served) == before
    async with InferenceClient(served.url) as client:
        request = JobRequest(kind="generate", model=MODEL, n=2, max_tokens=200, temperature=0, ignore_eos=True)
        job = await client.submit(request, [JobInput("hello")])
        for garbage in (b"", b"\xc1", msgspec.msgpack.encode({"schema": 9})):
            for name in ("nobody", f"{job.id}-1", f"{job.id}-99"):
                await redis.xadd(keys.finished(MODEL, job.id), {"id": name, "result": garbage})
        await redis.expire(keys.finished(MODEL, job.id), 60)
        ended = await client.wait(job.id)
    assert (ended.status, ended.counts.succeeded) == ("succeeded", 2)
    async with httpx.AsyncClient(base_url=served.url, timeout=HANG_S) as http:
        found = (await http.get("/v1/deadletters")).json()["data"]
        reasons = {letter["reason"] for letter in found}
        assert "no such sequence" in reasons
        assert any("schema 9" in reason for reason in reasons)
        assert not any(letter["requeueable"] for letter in found if letter["reason"] == "no such sequence")
    assert len(served.server.printed("worker.ready")) == 1
