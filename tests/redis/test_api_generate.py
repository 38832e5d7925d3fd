"""/generate, /inference/v1/generate, /tokenize and /detokenize, answered by a scripted worker."""

from typing import Any

import pytest

from shared.sequences import SequenceSpec
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api
from tests.redis.scripted_worker import MODEL, Answer, ScriptedWorker
from tests.unit.api_texts import EOS, codec, ids

HELLO = [*ids("hello"), EOS]


def script(spec: SequenceSpec) -> Answer:
    return Answer("hello", versions={0: spec.adapter} if "@" in spec.adapter else {})


async def test_one_prompt_gets_the_documented_fields(server: Api) -> None:
    body = {"prompt": "say", "temperature": 0.7, "top_p": 1.0, "max_tokens": 16, "logprobs": 1, "step_id": 1000}
    answer = (await server.post("/generate", {**body, "request_id": "mine"})).json()
    latency = answer["metadata"].pop("latency_ms")
    assert latency > 0
    assert answer == {
        "request_id": "mine",
        "policy_version": 0,
        "step_id": 1000,
        "prompt_ids": ids("say"),
        "completion_ids": HELLO,
        "text": "hello",
        "logprobs": [-0.25] * 6,
        "finish_reason": "stop",
        "weight_versions": [{"version": "", "start": 0, "end": 6}],
        "metadata": {"batch_size": 1, "current_policy_version": 0},
    }


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"prompts": ["a", "bc"]}, 2),
        ({"prompts": ["a"]}, 1),
        ({"prompt": "a", "n": 3}, 3),
        ({"prompt_ids": [ids("a"), ids("bc")], "n": 2}, 4),
    ],
)
async def test_several_prompts_or_samples_get_lists(server: Api, fields: dict[str, Any], count: int) -> None:
    answer = (await server.post("/generate", fields)).json()
    assert answer["text"] == ["hello"] * count
    assert answer["logprobs"] == [None] * count
    assert [len(answer[field]) for field in ("prompt_ids", "completion_ids", "finish_reason")] == [count] * 3
    assert (answer["prompt_ids"][0], answer["metadata"]["batch_size"]) == (ids("a"), count)


async def test_the_default_adapters_latest_version_answers(server: Api, worker: ScriptedWorker) -> None:
    for seed in range(2):
        await publish(server.ring.adapters, seed=seed)
    await publish(server.ring.adapters, "actor")
    for fields, adapter, version, latest in (
        ({}, "policy@2", 2, 2),
        ({"policy_version": 1}, "policy@1", 1, 2),
        ({"policy_version": 0}, "", 0, 2),
        ({"model": MODEL}, "", 0, 2),
        ({"model": MODEL, "policy_version": 2}, "policy@2", 2, 2),
        ({"adapter": "actor"}, "actor@1", 1, 1),
        ({"model": "actor", "policy_version": 1}, "actor@1", 1, 1),
    ):
        response = await server.post("/generate", {"prompt_ids": ids("a"), **fields})
        assert response.status_code == 200, response.text
        answer = response.json()
        assert worker.specs[-1].adapter == adapter
        assert (answer["policy_version"], answer["metadata"]["current_policy_version"]) == (version, latest)


async def test_a_demanded_version_that_is_not_there_conflicts(server: Api, worker: ScriptedWorker) -> None:
    for fields in (
        {"policy_version": 42},
        {"policy_version": 2, "adapter": "policy@1"},
        {"policy_version": 0, "adapter": "policy"},
    ):
        response = await server.post("/generate", {"prompt": "a", **fields})
        assert response.status_code == 409, response.text
        assert response.json()["error"]["param"] == "policy_version"
    assert worker.specs == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {}, "prompt"),
        ("/generate", {"prompt": "a", "prompts": ["b"]}, "prompt"),
        ("/generate", {"prompts": []}, "prompts"),
        ("/generate", {"prompt_ids": []}, "prompt"),
        ("/generate", {"prompt": "a", "stream": True}, "stream"),
        ("/generate", {"prompt": "a", "policy_version": -1}, "policy_version"),
        ("/inference/v1/generate", {}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [1], "stream_options": {"include_usage": True}}, "stream_options"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "stream": True, "sampling_params": {"prompt_logprobs": 1}},
            "sampling_params.prompt_logprobs",
        ),
        ("/inference/v1/generate", {"token_ids": [99999]}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"bad_words": "x"}}, None),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
    ],
)
async def test_what_is_wrong_is_named(server: Api, path: str, body: dict[str, Any], param: str | None) -> None:
    response = await server.post(path, body)
    assert response.status_code == 400, response.text
    assert param is None or response.json()["error"]["param"] == param


async def test_tokens_go_in_and_out(server: Api, worker: ScriptedWorker) -> None:
    await publish(server.ring.adapters)
    sampling = {"max_tokens": 9, "logprobs": 1, "n": 2, "seed": 3, "detokenize": False, "prompt_logprobs": 0}
    body = {"token_ids": ids("say"), "model": "policy", "sampling_params": sampling, "request_id": "r"}
    response = await server.post("/inference/v1/generate", body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert (answer["request_id"], len(answer["choices"])) == ("r", 2)
    choice = answer["choices"][1]
    assert (choice["token_ids"], choice["finish_reason"]) == (HELLO, "stop")
    assert choice["weight_versions"] == [{"version": "policy@1", "start": 0, "end": 6}]
    first = choice["logprobs"]["content"][0]
    named = {"token": f"token_id:{HELLO[0]}", "token_id": HELLO[0], "logprob": -0.25, "bytes": None}
    assert first == {**named, "top_logprobs": [named]}
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1][str(ids("a")[0])]["logprob"] == -1.0
    assert (worker.specs[0].sampling.max_tokens, worker.specs[0].sampling.seed) == (9, 3)
    plain = (await server.post("/inference/v1/generate", {"prompt_token_ids": ids("say")})).json()
    assert plain["choices"][0]["logprobs"] is None
    assert worker.specs[-1].sampling.max_tokens == 256 - len(ids("say")), "up to the end of the context"
    drawn = {"token_ids": ids("say"), "sampling_params": {"logprobs": 0}}
    (alone,) = (await server.post("/inference/v1/generate", drawn)).json()["choices"]
    assert alone["logprobs"]["content"][0] == {**named, "top_logprobs": [named]}


async def test_tokens_are_streamed_as_they_come(server: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    sampling = {"n": 2, "logprobs": 0}
    body = {"token_ids": ids("say"), "request_id": "r", "stream_options": options, "sampling_params": sampling}
    async with server.stream("/inference/v1/generate", body) as stream:
        *chunks, last = await stream.all()
        assert stream.done
    assert {chunk["request_id"] for chunk in [*chunks, last]} == {"r"}
    assert len(chunks) > 2
    for index in range(2):
        said = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        choices = [chunk["choices"][0] for chunk in said]
        assert [token for choice in choices for token in choice["token_ids"]] == HELLO
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        logprobs = [each["token_id"] for choice in choices for each in choice["logprobs"]["content"]]
        assert logprobs == HELLO
        assert said[-1]["usage"]["completion_tokens"] == len(HELLO)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2 * len(HELLO))


async def test_text_becomes_tokens_and_text_again(server: Api) -> None:
    answer = (await server.post("/tokenize", {"prompt": "héllo", "return_token_strs": True})).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids("héllo"), len(ids("héllo")), 256)
    assert answer["token_strs"] == [codec().token(token) for token in answer["tokens"]]
    assert "".join(answer["token_strs"]) == "hÃ©llo", "as the vocabulary spells them"
    back = await server.post("/detokenize", {"model": MODEL, "tokens": answer["tokens"]})
    assert back.json() == {"prompt": "héllo"}
    chat = (await server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})).json()
    assert codec().decode(chat["tokens"]) == "user: hi\n"


async def test_a_prompt_of_token_ids_is_answered_in_the_shape_of_vllms_server(server: Api) -> None:
    body = {"prompt": {"prompt_token_ids": ids("say")}, "logprobs": 0, "n": 2, "max_tokens": 16, "temperature": 1.0}
    answer = (await server.post("/generate", body)).json()
    assert answer["text"] == ["hello", "hello"]
    assert answer["finish_reasons"] == ["stop", "stop"]
    assert answer["prompt_token_ids"] == ids("say") and answer["prompt"] == "say"
    assert answer["token_ids"] == [HELLO, HELLO]
    # As Atropos reads it: the only item of each position is {id: log-probability}.
    assert [[int(next(iter(item[0]))) for item in sample] for sample in answer["logprobs"]] == [HELLO, HELLO]
    assert all(list(item[0].values()) == [-0.25] for sample in answer["logprobs"] for item in sample)


async def test_a_wrong_prompt_object_is_refused_by_name(server: Api) -> None:
    for prompt in ({"prompt_token_ids": []}, {"prompt_tokens": [1]}, {"prompt_token_ids": ["a"]}, {}):
        refusal = await server.post("/generate", {"prompt": prompt})
        assert refusal.status_code == 400, refusal.text
        assert "prompt" in refusal.json()["error"]["param"]
