"""Requests that name adapters: what reaches the worker, and what is refused."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.adapter_files.formats import prepare_directory
from shared.errors import ConflictError
from shared.jobs import JobSpec
from shared.redis import keys
from shared.sequences import SequenceSpec
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import CARD, MODEL, Answer, ScriptedWorker
from tests.unit.adapter_files import write
from tests.unit.api_texts import ids
from tests.waiting import wait_until

VERSIONS = {0: "policy@1", 3: "policy@2"}


def script(spec: SequenceSpec) -> Answer:
    return Answer("hello", versions=VERSIONS if spec.adapter else {})


@pytest.fixture
async def server(redis_url: str, worker: ScriptedWorker) -> AsyncIterator[Api]:
    async with api(redis_url) as serving:
        await publish(serving.ring.adapters)
        await publish(serving.ring.adapters, seed=1)
        yield serving


@pytest.mark.parametrize(
    ("fields", "adapter", "policy"),
    [
        ({"model": MODEL}, "", "pin"),
        ({"model": "policy"}, "policy@2", "pin"),
        ({"model": "policy@1"}, "policy@1", "pin"),
        ({"model": "policy", "adapter_policy": "follow"}, "policy", "follow"),
        ({"model": "policy@1", "adapter_policy": "follow"}, "policy@1", "pin"),
        ({"model": MODEL, "adapter": "policy"}, "policy@2", "pin"),
        ({"lora_adapter": "policy@1"}, "policy@1", "pin"),
        ({"model": "policy", "adapter": "policy"}, "policy@2", "pin"),
        ({"model": "policy@1:0.5,policy@1000:0.0000000001", "user": "u"}, "policy@1", "pin"),
    ],
)
async def test_a_reference_reaches_the_worker(
    server: Api, worker: ScriptedWorker, fields: dict[str, Any], adapter: str, policy: str
) -> None:
    response = await server.post("/v1/completions", {"prompt": "say", **fields})
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["model"] == fields.get("model", MODEL)
    (spec,) = worker.specs
    assert (spec.model, spec.adapter, spec.adapter_policy) == (MODEL, adapter, policy)
    assert body["system_fingerprint"].endswith(f"-{adapter}" if policy == "pin" and adapter else "")
    assert ("policy@" in body["system_fingerprint"]) == bool(adapter)


async def publish_topics(server: Api, folder: Path, labels: list[str], *more: str) -> None:
    topics = {name: {"kind": "labels", "labels": labels} for name in ("topic", *more)}
    config = {"heads": {**topics, "value": {"kind": "scalar"}}}
    tensors = {f"heads.{name}.weight": np.ones((len(labels), 8), np.float32) for name in topics}
    tensors["heads.value.weight"] = np.ones((1, 8), np.float32)
    made = prepare_directory(write(folder / f"of-{len(labels)}", config, tensors), folder)
    await server.ring.adapters.publish("topics", made, base_sha256=CARD.base_sha256)


async def test_a_head_is_read_by_the_version_that_chose_it_whatever_the_policy(
    server: Api, worker: ScriptedWorker, tmp_path: Path
) -> None:
    for labels in (["a", "b"], ["a", "b", "c"]):
        await publish_topics(server, tmp_path, labels)
    worker.script = lambda spec: Answer(
        "hello", embedding=np.zeros(3 if spec.adapter == "topics@2" else 2, "<f4").tobytes()
    )
    target = {"model": "topics", "adapter_policy": "follow"}
    response = await server.post("/v1/classifications", {**target, "input": "a"})
    assert response.status_code == 200 and len(response.json()["data"][0]["probs"]) == 3, response.text
    response = await server.post("/v1/rl/act", {**target, "observations": ["a"], "max_tokens": 4})
    assert response.json()["value_estimates"] == [0.0]
    heads = [(spec.adapter, spec.adapter_policy) for spec in worker.specs if spec.kind == "head"]
    assert heads == [("topics@2", "pin")] * 2
    assert [spec.adapter_policy for spec in worker.specs if spec.kind == "generate"] == ["follow"]


async def test_several_heads_for_a_reward_are_a_matter_of_its_option(server: Api, tmp_path: Path) -> None:
    await publish_topics(server, tmp_path, ["a", "b"], "other")
    reward = {"name": "model", "label": "a"}
    for body in ({"model": "topics", "reward": reward}, {"reward": {**reward, "model": "topics"}}):
        answer = await server.post("/v1/rewards/score", {**body, "completions": "x"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "reward"), answer.text
        assert "name one of other, topic, as the reward's option 'head'" in error["message"]


async def test_a_user_stays_with_one_side_of_a_split(server: Api, worker: ScriptedWorker) -> None:
    body = {"model": "policy@1:0.5,policy@2:0.5", "messages": [{"role": "user", "content": "hi"}]}
    for user in "abcdefgh" * 2:
        assert (await server.post("/v1/chat/completions", {**body, "user": user})).status_code == 200
    taken = [spec.adapter for spec in worker.specs]
    assert taken[:8] == taken[8:]
    assert set(taken) == {"policy@1", "policy@2"}


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"model": "nobody"}, 404, "model_not_found"),
        ({"model": "hub/nobody"}, 404, "model_not_found"),
        ({"model": "policy@9"}, 404, "adapter_not_found"),
        ({"model": "nobody@1"}, 404, "adapter_not_found"),
        ({"adapter": "nobody"}, 404, "adapter_not_found"),
        ({"model": MODEL, "lora_adapter": "policy@9"}, 404, "adapter_not_found"),
        ({"model": "policy@0"}, 400, None),
        ({"model": MODEL, "adapter": "a/b"}, 400, None),
        ({"model": "nobody", "adapter": "policy"}, 404, "model_not_found"),
        ({"model": MODEL, "adapter": "stranger"}, 400, None),
        ({"model": "stranger"}, 503, "service_unavailable"),
    ],
)
async def test_what_does_not_exist_or_fit_is_refused(
    server: Api, worker: ScriptedWorker, fields: dict[str, Any], status: int, code: str | None
) -> None:
    await publish(server.ring.adapters, "stranger", base="another base")
    for path, what in (
        ("/v1/completions", {"prompt": "say"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        response = await server.post(path, {**what, **fields})
        assert response.status_code == status, response.text
        assert response.json()["error"]["code"] == code
    assert worker.specs == []


async def test_version_spans_come_on_request(server: Api) -> None:
    body = {"model": "policy", "prompt": "say", "adapter_policy": "follow", "return_weight_versions": True}
    choice = (await server.post("/v1/completions", body)).json()["choices"][0]
    assert choice["weight_versions"] == [
        {"version": "policy@1", "start": 0, "end": 3},
        {"version": "policy@2", "start": 3, "end": 6},
    ]
    base = {"model": MODEL, "prompt": "say", "return_weight_versions": True}
    choice = (await server.post("/v1/completions", base)).json()["choices"][0]
    assert choice["weight_versions"] == [{"version": "", "start": 0, "end": 6}]
    assert "weight_versions" not in (await server.post("/v1/completions", {"prompt": "a"})).json()["choices"][0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_chunks_carry_the_spans_of_their_tokens(server: Api, path: str) -> None:
    what: dict[str, Any] = (
        {"prompt": "say"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    )
    body = {**what, "model": "policy", "adapter_policy": "follow", "return_weight_versions": True}
    async with server.stream(path, body) as events:
        chunks = await events.all()
    spans = [span for chunk in chunks for span in chunk["choices"][0].get("weight_versions", [])]
    versions = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    assert versions == ["policy@1"] * 3 + ["policy@2"] * 3
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert all(chunk["system_fingerprint"].endswith("-policy@2") for chunk in chunks)


async def test_a_resumed_stream_tells_only_the_spans_that_were_missed(server: Api) -> None:
    body = {
        "model": "policy", "prompt": "say", "return_weight_versions": True,
        "stream_options": {"include_event_ids": True},
    }  # fmt: skip
    async with server.stream("/v1/completions", body) as events:
        first = await events.next()
        assert first is not None
        seen, rest = events.last_event_id, await events.all()
    assert rest
    end = first["choices"][0]["weight_versions"][-1]["end"]
    async with server.resume(first["id"], seen) as events:
        chunks = await events.all()
    spans = [span for chunk in chunks for span in chunk["choices"][0]["weight_versions"]]
    assert (spans[0]["start"], spans[-1]["end"]) == (end, 6)


async def test_models_lists_adapters_under_their_base(server: Api) -> None:
    await publish(server.ring.adapters, "stranger", base="another base")
    await publish(server.ring.adapters, "candidate", set_latest=False)
    listed = (await server.http.get("/v1/models")).json()["data"]
    assert [(model["id"], model["parent"], model["version"]) for model in listed] == [
        (MODEL, None, None),
        ("policy", MODEL, 2),
    ]
    assert listed[1]["root"] == "policy@2"
    assert (await server.http.get("/v1/models/policy@1")).json()["version"] == 1
    assert (await server.http.get("/v1/models/policy@3")).status_code == 404


@pytest.mark.parametrize(
    ("fields", "adapter", "policy"),
    [
        ({"model": "policy"}, "policy", "follow"),
        ({"model": MODEL, "lora_adapter": "policy", "adapter_policy": "pin"}, "policy@2", "pin"),
        ({"adapter": "policy@1:0.5,policy@2:0.5"}, "policy@1:0.5,policy@2:0.5", "follow"),
        ({"model": MODEL}, "", "follow"),
    ],
)
async def test_jobs_follow_unless_they_pin(server: Api, fields: dict[str, Any], adapter: str, policy: str) -> None:
    response = await server.post("/v1/jobs", {"kind": "generate", "prompts": [ids("a")], **fields})
    assert response.status_code == 202, response.text
    spec = await server.ring.jobs.spec(response.json()["id"])
    assert (spec.model, spec.adapter, spec.adapter_policy) == (MODEL, adapter, policy)
    wrong = await server.post("/v1/jobs", {"kind": "generate", "prompts": [ids("a")], "adapter": "policy@9"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "adapter_not_found")


async def test_the_version_of_a_waiting_request_is_not_deleted(server: Api, worker: ScriptedWorker) -> None:
    """From admission on, also before any worker has claimed it; the latest moves on meanwhile."""
    adapters = server.ring.adapters
    await publish(adapters, name="slow")
    worker.script = lambda spec: Answer("hello", hold_at=1)
    asking = asyncio.create_task(server.post("/v1/completions", {"model": "slow", "prompt": "say"}))
    await wait_until(lambda: any(spec.adapter == "slow@1" for spec in worker.specs))
    await publish(adapters, name="slow", seed=1)
    with pytest.raises(ConflictError, match="in use by cmpl-"):
        await adapters.delete("slow", 1)
    worker.go.set()
    assert (await asking).status_code == 200

    async def unpinned() -> bool:
        return not await server.ring.redis.exists(keys.adapter_pins("slow"))

    await wait_until(unpinned)
    await adapters.delete("slow", 1)


async def test_the_versions_of_a_job_are_not_deleted_before_it_has_ended(server: Api) -> None:
    jobs, adapters = server.ring.jobs, server.ring.adapters
    spec = JobSpec("", "generate", MODEL, 0, adapter="policy@1:0.5,policy@2:0.5")
    job_id, _ = await jobs.create(spec, [b'{"prompt": "say"}'])
    await publish(adapters, seed=3)
    for version in (1, 2):
        with pytest.raises(ConflictError, match=f"in use by job:{job_id}"):
            await adapters.delete("policy", version)
    assert (await jobs.cancel(job_id)).status == "cancelled"
    for version in (1, 2):
        await adapters.delete("policy", version)
