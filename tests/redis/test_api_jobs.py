"""Jobs over HTTP: what enters, what is refused whole, and how results are read."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.jobs.ledger import JobLedger, SampleRecord
from shared.redis.processes.worker_registry import WorkerRegistry, WorkerStatus
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import CARD, MODEL
from tests.unit.api_texts import bundle

JOB = {"kind": "rollout", "model": MODEL, "reward": {"name": "exact"}}


PART = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.fixture
async def server(redis_url: str) -> AsyncIterator[Api]:
    """An api, and no runner: jobs stay queued."""
    redis = connect(redis_url)
    await WorkerRegistry(redis).register_model(CARD, bundle())
    async with api(redis_url, max_upload_bytes=50_000) as serving:
        yield serving
    await redis.aclose()


async def upload(server: Api, lines: bytes, spec: Any = None) -> Any:
    files = {"file": ("prompts.jsonl", lines)}
    return await server.http.post("/v1/jobs", data={"spec": json.dumps(spec or JOB)}, files=files)


async def test_a_job_is_accepted_polled_listed_and_cancelled(server: Api) -> None:
    body = {**JOB, "prompts": ["a", "b"], "references": ["1", "2"], "n": 3, "metadata": {"run": "x"}}
    response = await server.post("/v1/jobs", body)
    status = response.json()
    assert response.status_code == 202
    assert response.headers["location"] == f"/v1/jobs/{status['id']}"
    assert (status["status"], status["counts"]["total"], status["metadata"]) == ("queued", 6, {"run": "x"})
    assert (await server.http.get(f"/v1/jobs/{status['id']}")).json() == status
    assert [job["id"] for job in (await server.http.get("/v1/jobs")).json()["data"]] == [status["id"]]
    cancelled = (await server.http.post(f"/v1/jobs/{status['id']}/cancel")).json()
    assert (cancelled["status"], cancelled["counts"]["cancelled"]) == ("cancelled", 6)


async def test_a_temporary_folder_that_cannot_be_written_to_is_not_called_a_redis_that_is_away(
    redis_url: str, server: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    async with api(redis_url, max_upload_bytes=8 << 20) as serving:
        response = await upload(serving, (b'"' + b"a" * 16_384 + b'"\n') * 128)
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    assert "temporary folder" in message and "Redis" not in message and "nowhere" not in message


async def test_a_pattern_that_takes_long_to_compile_is_refused_and_stops_nobody(server: Api) -> None:
    pattern = "(?i)" + "[a-\U0010ffff]" * 815
    body = {**JOB, "prompts": ["a"], "reward": {"name": "regex", "pattern": pattern}}
    submitting = asyncio.create_task(server.post("/v1/jobs", body))
    asked = 0
    while not submitting.done():
        assert (await server.http.get("/v1/jobs")).status_code == 200
        asked += 1
    refused = (await submitting).json()["error"]
    assert refused["param"] == "reward.options" and "to compile" in refused["message"]
    assert asked > 10  # it used to be answered before anybody else


async def test_a_job_that_has_ended_can_be_deleted_and_its_key_used_again(server: Api, redis: Redis) -> None:
    body = {**JOB, "prompts": ["a"] * 3, "n": 2, "idempotency_key": "k"}
    first = (await server.post("/v1/jobs", body)).json()["id"]
    refused = await server.http.delete(f"/v1/jobs/{first}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    line = json.dumps({"prompt_index": 0, "sample_index": 0}).encode()
    await JobLedger(redis).record(first, [SampleRecord(0, line, "succeeded")])
    await server.http.post(f"/v1/jobs/{first}/cancel")
    assert (await server.http.delete(f"/v1/jobs/{first}")).json() == {"id": first, "object": "job", "deleted": True}
    assert not [key async for key in redis.scan_iter(f"parallm:job:*{first}*")]
    assert (await server.http.get("/v1/jobs")).json()["data"] == []
    assert (await server.http.delete(f"/v1/jobs/{first}")).status_code == 404
    assert (await server.post("/v1/jobs", body)).json()["id"] != first


@pytest.mark.parametrize("parts", [False, True])
async def test_a_model_that_scores_a_job_cannot_be_deleted_before_its_end(
    server: Api, redis: Redis, parts: bool
) -> None:
    status = WorkerStatus("w1", MODEL, "host", 1, "ready", 0, 8, 0, 0, 1, 0.0, 0, 1, 2**40)
    await WorkerRegistry(redis).heartbeat(status)
    for seed in range(2):
        await publish(server.ring.adapters, "judge", seed=seed)
    judge = {"name": "judge", "options": {"model": "judge@1"}}
    reward = {"name": "weighted", "parts": [judge, {"name": "exact"}]} if parts else judge
    answer = await server.post("/v1/jobs", {**JOB, "reward": reward, "prompts": ["a"]})
    assert answer.status_code == 202, answer.text
    job = answer.json()["id"]
    for path in ("/v1/adapters/judge/versions/1", "/v1/adapters/judge"):
        refused = await server.http.delete(path)
        assert refused.status_code == 409 and job in refused.text, refused.text
    assert (await server.post(f"/v1/jobs/{job}/cancel", {})).status_code == 200
    assert (await server.http.delete("/v1/adapters/judge/versions/1")).status_code == 200


async def test_a_job_that_is_deleted_as_it_ends_pins_no_adapter_version(server: Api, redis: Redis) -> None:
    """Its runner comes too late to let go of what the job has held."""
    await publish(server.ring.adapters)
    body = {**JOB, "kind": "generate", "reward": None, "prompts": ["a"], "adapter": "policy@1"}
    job = (await server.post("/v1/jobs", body)).json()["id"]
    assert await redis.zcard(keys.adapter_pins("policy")) == 1
    await redis.hset(keys.job(job), "state", "succeeded")
    assert (await server.http.delete(f"/v1/jobs/{job}")).status_code == 200
    assert await redis.zcard(keys.adapter_pins("policy")) == 0
    assert not await JobLedger(redis).finish(job, "succeeded")


async def test_an_uploaded_job_has_one_prompt_a_line(server: Api) -> None:
    lines = b'"a"\n\n{"messages": [{"role": "user", "content": "hi"}], "reference": "r"}\n{"prompt_ids": [1]}\n'
    response = await upload(server, lines, {**JOB, "n": 2})
    assert response.status_code == 202
    assert response.json()["counts"]["total"] == 6
    inputs = await JobLedger(server.ring.redis).inputs(response.json()["id"], 0, 10)
    assert [json.loads(line)["prompt"] for line in inputs] == ["a", [{"role": "user", "content": "hi"}], [1]]


@pytest.mark.parametrize(
    ("lines", "word"), [(b'"a"\n{"prompt": 5}\n', "line 2"), (b'"a"\n' * 700 + b"{\n", "line 701"), (b"\n\n", "one")]
)
async def test_a_bad_upload_creates_nothing(server: Api, lines: bytes, word: str) -> None:
    response = await upload(server, lines)
    assert response.status_code == 400
    assert word in response.json()["error"]["message"]
    assert (await server.http.get("/v1/jobs")).json()["data"] == []
    assert [key async for key in server.ring.redis.scan_iter("parallm:job:*")] == []


async def test_an_upload_beyond_the_bound_is_refused(server: Api) -> None:
    assert (await upload(server, b'"a"\n' * 20_000)).status_code == 413


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({**JOB}, 400, "prompts"),
        ({**JOB, "prompts": []}, 400, "prompts"),
        ({**JOB, "prompts": ["a"], "references": []}, 400, "references"),
        ({**JOB, "prompts": ["a"], "reward": {"name": "magic"}}, 400, "reward.name"),
        ({**JOB, "prompts": ["a"], "reward": {"name": "exact", "strictness": 1}}, 400, "reward.options"),
        ({**JOB, "prompts": ["a"], "model": "nobody"}, 404, "model"),
        ({**JOB, "prompts": ["a"], "surprise": 1}, 400, "surprise"),
        ({"kind": "rollout", "model": MODEL, "prompts": ["a"]}, 400, "reward"),
        ({**JOB, "prompts": [[{"role": "user", "content": [PART]}]]}, 400, "prompts"),
        ({**JOB, "prompts": [[{"role": "user", "content": [{"type": "image"}]}]]}, 400, "prompts"),
    ],
)
async def test_bad_jobs_are_refused_by_name(server: Api, body: dict[str, Any], status: int, param: str) -> None:
    response = await server.post("/v1/jobs", body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_an_idempotency_key_gives_the_same_job(server: Api) -> None:
    body = {**JOB, "prompts": ["a"], "idempotency_key": "k"}
    first = (await server.post("/v1/jobs", body)).json()["id"]
    assert (await server.post("/v1/jobs", body)).json()["id"] == first
    plain = {key: value for key, value in body.items() if key != "idempotency_key"}
    by_header = await server.post("/v1/jobs", plain, headers={"idempotency-key": "k"})
    assert by_header.json()["id"] == first
    other = await server.post("/v1/jobs", {**body, "n": 2})
    assert other.status_code == 409


async def test_unknown_jobs_are_404(server: Api) -> None:
    for path in ("/v1/jobs/none", "/v1/jobs/none/results"):
        response = await server.http.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "job_not_found")
    assert (await server.http.post("/v1/jobs/none/cancel")).status_code == 404


async def test_results_are_json_lines_in_order_with_the_place_to_go_on(server: Api) -> None:
    job_id = (await server.post("/v1/jobs", {**JOB, "prompts": ["a"] * 4})).json()["id"]
    ledger = JobLedger(server.ring.redis)
    assert await ledger.begin(job_id, "runner", 0) is not None
    done = [SampleRecord(i, b'{"n":%d}' % i, "succeeded") for i in (0, 1, 3)]
    await ledger.record(job_id, done)

    async def results(query: str = "") -> tuple[list[int], str]:
        response = await server.http.get(f"/v1/jobs/{job_id}/results{query}")
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line)["n"] for line in response.text.splitlines()], response.headers["x-next-after"]

    assert await results() == ([0, 1, 3], "1")  # 2 may still come: go on behind 1
    assert await results("?limit=2") == ([0, 1], "1")
    assert await results("?limit=2&after=1") == ([3], "3")
    assert await results("?complete_only=true") == ([0, 1], "1")
    assert await results("?after=3") == ([], "3")


def told(lines: list[str]) -> list[tuple[str, str, Any]]:
    """(id, event, data) of each server-sent event."""
    events = []
    for block in "\n".join(lines).split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            events.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
    return events


async def test_a_job_is_watched_as_its_samples_finish_and_again_behind_any_of_them(
    server: Api, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.jobs.stream.SILENCE_S", 0.0)
    job_id = (await server.post("/v1/jobs", {**JOB, "prompts": ["a"] * 4})).json()["id"]
    ledger = JobLedger(server.ring.redis)
    assert await ledger.begin(job_id, "runner", 0) is not None
    path, lines = f"/v1/jobs/{job_id}/stream", list[str]()
    async with server.http.stream("GET", path) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        reading = response.aiter_lines()
        lines.append(await anext(reading))
        assert lines[0].startswith(":"), "a job that is silent says so"
        for ordinal in (3, 0, 0, 2):
            await ledger.record(job_id, [SampleRecord(ordinal, b'{"n":%d}' % ordinal, "succeeded")])
        lines += [line async for line in _until(reading, "id: 2")]
    async with api(redis_url) as other, other.http.stream("GET", path, headers={"Last-Event-ID": "0"}) as response:
        await ledger.record(job_id, [SampleRecord(1, b'{"n":1}', "succeeded")])
        assert await ledger.finish(job_id, "succeeded")
        rest = told([line async for line in response.aiter_lines()])
    assert [(name, data["n"]) for name, event, data in rest[:-1]] == [("1", 0), ("2", 2), ("3", 1)]
    assert rest[-1][1] == "status" and rest[-1][2]["status"] == "succeeded"
    whole = told((await server.http.get(path)).text.splitlines())
    assert whole[1:] == rest and whole[0] == ("0", "trajectory", {"n": 3})
    assert told((await server.http.get(path, headers={"Last-Event-ID": "3"})).text.splitlines()) == rest[-1:]
    await server.http.delete(f"/v1/jobs/{job_id}")
    assert (await server.http.get(path)).status_code == 404
    assert not await server.ring.redis.exists(keys.job_order(job_id))


async def _until(lines: AsyncIterator[str], last: str) -> AsyncIterator[str]:
    async for line in lines:
        yield line
        if line == last:
            return


@pytest.mark.parametrize("wrong", ["x", "-1", "1.5", "9" * 30, "\u0663".encode()])
async def test_a_place_that_is_none_is_refused(server: Api, wrong: Any) -> None:
    job_id = (await server.post("/v1/jobs", {**JOB, "prompts": ["a"]})).json()["id"]
    refused = await server.http.get(f"/v1/jobs/{job_id}/stream", headers={"Last-Event-ID": wrong})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "Last-Event-ID"
