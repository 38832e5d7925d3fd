"""Networks over HTTP: uploaded, listed, moved and deleted as adapters are, and asked by nobody who wants a text."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from api.http.api_keys import line_of
from shared.networks.tensors import pack, unpack
from shared.redis import keys
from shared.redis.kept.kept_things import KeptThings, Terms
from shared.redis.kept.session_store import SessionStore, begun
from shared.redis.processes.worker_registry import WorkerRegistry, WorkerStatus
from shared.redis.queue.sequence_queue import SequenceQueue
from shared.sequences import SequenceSpec
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import CARD, MODEL, Answer, ScriptedWorker, working
from tests.redis.test_api_adapters import files
from tests.unit.adapter_files import lora, mlx_config
from tests.unit.api_texts import bundle
from tests.unit.networks import GAUSSIAN, LSTM, MLP, weights_of
from tests.waiting import wait_until


@pytest.fixture
async def worker(redis_url: str) -> AsyncIterator[ScriptedWorker]:
    async with working(redis_url, lambda spec: Answer()) as playing:
        yield playing


@pytest.fixture
async def server(redis_url: str, worker: ScriptedWorker) -> AsyncIterator[Api]:
    async with api(redis_url) as serving:
        yield serving


async def upload(server: Api, name: str, described: Any, seed: int = 0, **fields: str) -> Any:
    parts = files({"network": described}, weights_of(described, seed))
    answer = await server.http.post("/upload_adapter", data={"name": name, **fields}, files=parts)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_network_is_versioned_as_an_adapter_is(server: Api) -> None:
    created = await server.http.post(
        "/v1/adapters", data={"name": "pole"}, files=files({"network": MLP}, weights_of(MLP))
    )
    assert created.status_code == 201, created.text
    manifest = created.json()
    assert (manifest["kind"], manifest["base_sha256"], manifest["modules"]) == ("network", "network", [])
    assert manifest["network"]["inputs"] == {"observation": {"shape": [4], "dtype": "float32", "below": 0}}
    assert manifest["network"]["outputs"]["value"] == {"of": "v", "shape": [1], "dtype": "float32"}
    bare = await server.http.post("/v1/adapters/pole/versions", files=files(None, weights_of(MLP, 1)))
    assert (bare.status_code, bare.json()["network"]) == (201, manifest["network"]), bare.text
    await upload(server, "pole", LSTM, set_latest="false")
    shown = (await server.http.get("/v1/adapters/pole")).json()
    assert (shown["latest"], [each["version"] for each in shown["versions"]]) == (2, [1, 2, 3])
    assert (await server.http.post("/v1/adapters/pole/promote", json={"version": 3})).status_code == 200
    assert (await server.http.post("/v1/adapters/pole/rollback")).json()["policy_version"] == 2
    assert (await server.http.delete("/v1/adapters/pole/versions/1")).status_code == 200
    assert [each["name"] for each in (await server.http.get("/v1/adapters")).json()["data"]] == ["pole"]
    assert "pole" not in (await server.http.get("/v1/models")).text, "nobody can chat with it"
    assert (await server.http.delete("/v1/adapters/pole")).status_code == 200
    assert (await server.http.get("/v1/adapters/pole")).status_code == 404


async def test_a_name_is_that_of_a_network_or_of_an_adapter(server: Api) -> None:
    await upload(server, "pole", MLP)
    assert (await server.http.post("/upload_adapter", data={"name": "tone"}, files=files(mlx_config()))).is_success
    wrong = weights_of(MLP)
    wrong["v.weight"] = np.full((1, 16), np.inf, np.float32)
    network = files({"network": MLP}, weights_of(MLP))
    for name, parts, fields, words in (
        ("pole", files(mlx_config(), lora()), {}, "'pole' is the name of a network"),
        ("tone", network, {}, "'tone' is the name of a language model's adapter"),
        ("pole", network, {"model": MODEL}, "no base model"),
        ("pole", files(None, weights_of(GAUSSIAN)), {}, "is missing"),
        ("pole", files({"network": MLP}, wrong), {}, "v.weight: value 0 is not finite"),
        ("pole", files({"network": {**MLP, "code": "x"}}, weights_of(MLP)), {}, "code"),
    ):
        refused = await server.http.post("/upload_adapter", data={"name": name, **fields}, files=parts)
        assert refused.status_code == 400 and words in refused.json()["error"]["message"], refused.text
    assert (await server.http.get("/v1/adapters/pole")).json()["latest"] == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/classifications", {"input": "hi", "labels": ["a", "b"]}),
        ("/v1/jobs", {"kind": "generate", "prompts": ["hi"]}),
        ("/tokenize", {"prompt": "hi"}),
        ("/v1/rewards/score", {"completions": "a", "prompts": "b", "reward": "judge"}),
        ("/inference/v1/generate", {"token_ids": [1]}),
    ],
)
async def test_who_wants_a_text_is_told_that_this_is_a_network(server: Api, path: str, body: dict[str, Any]) -> None:
    await upload(server, "pole", MLP)
    for model in ("pole", "pole@1"):
        refused = await server.http.post(path, json={"model": model, **body})
        assert refused.status_code == 400, refused.text
        assert "pole@1 is a network" in refused.json()["error"]["message"]


async def test_what_is_no_number_takes_no_more_memory_than_it_came_in(server: Api) -> None:
    """An array of texts would have room for the longest one at each place, and a shape of many sizes a vast product."""
    await upload(server, "pole", MLP)
    tracemalloc.start()
    try:
        for observation in ([[1.0, "a" * 20_000, *[""] * 2000]], {"data": "", "shape": [2**62] * 2000}):
            body = {"model": "pole", "inputs": {"observation": observation}}
            refused = await server.http.post("/v1/predict", json=body)
            assert refused.status_code == 400, refused.text
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


async def test_requests_to_a_network_are_not_split(server: Api) -> None:
    for seed in range(2):
        await upload(server, "pole", MLP, seed)
    refused = await server.http.put("/v1/adapters/pole/split", json={"split": "pole@1:0.5,pole@2:0.5"})
    assert refused.status_code == 400 and "pole@1 is a network" in refused.text


async def test_a_manifest_of_a_later_version_of_this_program_is_told_as_such(server: Api) -> None:
    await upload(server, "pole", MLP)
    key = keys.adapter_manifest("pole", 1)
    raw = await server.ring.redis.get(key)
    await server.ring.redis.set(key, raw.replace(b'"kind":"network"', b'"kind":"later"'), keepttl=True)
    answer = await server.http.get("/v1/adapters/pole/versions/1")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "incompatible_version"), answer.text


# -- sessions


def acting(spec: SequenceSpec) -> Answer:
    """A recurrent network that counts its steps."""
    rows = unpack(spec.tensors)
    count = len(rows["observation"])
    h = rows.get("memory.h", np.zeros((count, 8), np.float32)) + 1
    logits = np.zeros((count, 3), np.float32)
    return Answer(embedding=pack({"action_logits": logits, "memory.h": h, "memory.c": h}))


async def test_a_session_belongs_to_whoever_began_it(redis_url: str, tmp_path: Path) -> None:
    keys_file = tmp_path / "keys"
    names = {name: f"the-key-of-{name}-is-long" for name in ("alice", "bob", "root")}
    lines = [line_of(names["root"], name="root", role="admin")]
    lines += [line_of(names[name], name=name, tenant=name) for name in ("alice", "bob")]
    keys_file.write_text("\n".join(lines))
    body = {"model": "pole", "observations": [[0, 0, 0, 0]], "session_id": "e"}
    async with working(redis_url, acting), api(redis_url, api_key_file=keys_file, session_ttl_s=50) as server:

        async def step(name: str, **fields: Any) -> Any:
            headers = {"authorization": f"Bearer {names[name]}"}
            return (await server.http.post("/v1/rl/act", json={**body, **fields}, headers=headers)).json()

        server.http.headers["authorization"] = f"Bearer {names['root']}"
        await upload(server, "pole", LSTM)
        assert (await step("alice", reset=True))["session_step"] == 1
        assert (await step("bob"))["error"]["code"] == "session_not_found"
        assert (await step("bob", reset=True))["session_step"] == 1
        assert (await step("alice"))["session_step"] == 2
        second = await step("bob")
        assert (second["session_step"], second["new_hidden_states"]["memory.h"][0][0]) == (2, 2.0)
        left = [await server.ring.redis.ttl(key) for key in await server.ring.redis.keys("parallm:kept:*:thing:e")]
        assert len(left) == 2 and all(0 < each <= 50 for each in left)


async def test_sessions_have_a_bound_and_those_used_longest_ago_go(server: Api) -> None:
    store = SessionStore(server.ring.redis, Terms(60, 3000))
    sessions = {id: begun("pole") for id in ("a", "b", "c")}
    for id, session in sessions.items():
        assert await store.move("keeper", id, session, bytes(900))
    assert [id for id in sessions if await store.find("keeper", id) is not None] == ["b", "c"]
    assert not await store.move("keeper", "a", sessions["a"]._replace(step=1), b""), (
        "it is gone, and does not come back"
    )
    (found,) = [await store.find("keeper", "b")]
    assert found is not None and (found.step, found.policy, found.state) == (1, "pole", bytes(900))
    same = {"at": "m:2", "policy": "pole", "state": b"2"}
    for _ in range(2):  # the call is said again, since its answer was lost
        assert await KeptThings(server.ring.redis, Terms(60, 3000)).put("keeper", "b", dict(same), at=found.at)
    assert not await store.move("keeper", "b", found, b""), "another one from the same step comes too late"
    assert await store.move("keeper", "b", begun("pole"), b"") and not await store.move("keeper", "b", found, b"")


async def test_rows_go_to_another_model_when_the_workers_of_theirs_have_gone(redis_url: str) -> None:
    async with working(redis_url, acting), api(redis_url) as server:
        redis = server.ring.redis
        registry, status = (
            WorkerRegistry(redis),
            WorkerStatus("w0", "0", "h", 1, "ready", 0, 8, 0, 0, 1, 0.0, 0, 1, 2**40),
        )
        await registry.register_model(msgspec.structs.replace(CARD, name="0"), bundle())
        await registry.heartbeat(status)
        await upload(server, "pole", LSTM)

        async def serves() -> bool:
            return "0" in await server.ring.live_models()

        async def waits() -> bool:
            return (await SequenceQueue(redis, "0").depth())["interactive"].waiting == 1

        await wait_until(serves)
        body = {"model": "pole", "observations": [[0, 0, 0, 0]], "session_id": "e", "reset": True}
        asked = asyncio.create_task(server.http.post("/v1/rl/act", json=body))
        await wait_until(waits)
        await registry.remove("0", "w0")
        answer = await asked
        assert (answer.status_code, answer.json()["session_step"]) == (200, 1)

        async def is_gone() -> bool:
            return not await waits()

        await wait_until(is_gone)
