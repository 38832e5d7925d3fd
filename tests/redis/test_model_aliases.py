"""`--model-alias GLOB=NAME`: what requests may call a model, wherever they name one."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import ValidationError

from shared.process.api_settings import ApiSettings
from shared.sequences import SequenceSpec
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer, ScriptedWorker

ALIASES = [f"claude-*={MODEL}", "claude-3=nobody", f"haiku={MODEL}", "tuned=shared@1", "lost=nobody", "*-v2=shared"]
HELLO = [{"role": "user", "content": "hi"}]


def script(spec: SequenceSpec) -> Answer:
    return Answer("hello")


@pytest.fixture
async def server(redis_url: str, worker: ScriptedWorker) -> AsyncIterator[Api]:
    async with api(redis_url, model_alias=ALIASES) as serving:
        await publish(serving.ring.adapters, "shared")
        await publish(serving.ring.adapters, "claude-own")
        yield serving


TAKES_A_MODEL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/generate": {"prompt": "a"},
    "/inference/v1/generate": {"token_ids": [5]},
    "/tokenize": {"prompt": "a"},
    "/v1/jobs": {"kind": "generate", "prompts": ["a"]},
}
MEANT = {  # by a name: the adapter, which a name of our own has before any alias
    MODEL: "",
    "claude-x": "",
    "claude-own": "claude-own@1",
    "tuned": "shared@1",
    "a-v2": "shared@1",
    "claude-3": "",  # the first alias that matches counts
}


async def test_every_endpoint_that_takes_a_model_takes_its_alias(server: Api) -> None:
    for path, body in TAKES_A_MODEL.items():
        answer = await server.post(path, {**body, "model": "claude-opus-9"})
        assert answer.status_code in (200, 202), (path, answer.text)
        assert (await server.post(path, {**body, "model": "gpt-9"})).status_code == 404, path


async def test_names_of_models_and_adapters_go_before_aliases(server: Api, worker: ScriptedWorker) -> None:
    for model, adapter in MEANT.items():
        answer = await server.post("/v1/completions", {"prompt": "a", "model": model})
        assert answer.status_code == 200, (model, answer.text)
        assert answer.json()["model"] == model, "as the client calls it"
        assert (worker.specs[-1].model, worker.specs[-1].adapter) == (MODEL, adapter), model
    lost = await server.post("/v1/completions", {"prompt": "a", "model": "lost"})
    assert lost.status_code == 404 and "nobody" in lost.json()["error"]["message"]
    versioned = await server.post("/generate", {"prompt": "a", "model": "a-v2", "policy_version": 1})
    assert versioned.status_code == 200, versioned.text
    assert worker.specs[-1].adapter == "shared@1"


async def test_aliases_that_are_names_are_listed_and_all_are_described(server: Api) -> None:
    listed = {each["id"]: each["root"] for each in (await server.http.get("/v1/models")).json()["data"]}
    named = {"haiku": MODEL, "claude-3": MODEL, "tuned": "shared@1"}
    assert listed == {MODEL: MODEL, "shared": "shared@1", "claude-own": "claude-own@1", **named}
    described = (await server.http.get("/v1/models/claude-opus-9")).json()
    assert (described["id"], described["root"]) == ("claude-opus-9", MODEL)
    assert (await server.http.get("/v1/models/lost")).status_code == 404


@pytest.mark.parametrize("wrong", ["claude", "=tiny", "claude-*="])
def test_what_is_no_alias_is_refused_at_start(wrong: str) -> None:
    with pytest.raises(ValidationError, match="GLOB=NAME"):
        ApiSettings(model_alias=[wrong])
