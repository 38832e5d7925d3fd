"""Networks over HTTP: uploaded, listed, moved and deleted as adapters are, and asked by nobody who wants a text."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from shared.redis import keys
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer, ScriptedWorker, working
from tests.redis.test_api_adapters import files
from tests.unit.adapter_files import lora, mlx_config
from tests.unit.networks import GAUSSIAN, LSTM, MLP, weights_of


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


async def test_a_manifest_of_a_later_version_of_this_program_is_told_as_such(server: Api) -> None:
    await upload(server, "pole", MLP)
    key = keys.adapter_manifest("pole", 1)
    raw = await server.ring.redis.get(key)
    await server.ring.redis.set(key, raw.replace(b'"kind":"network"', b'"kind":"later"'), keepttl=True)
    answer = await server.http.get("/v1/adapters/pole/versions/1")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "incompatible_version"), answer.text
