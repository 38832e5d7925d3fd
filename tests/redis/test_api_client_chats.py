"""Chats as other clients send them: continued messages, a part of the tools, calls in OpenAI's older form."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from shared.frames import Finish
from shared.process.settings import version
from shared.sequences import SequenceSpec
from shared.text.codec import TextCodec, TokenizerBundle
from tests.redis import scripted_worker
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer, ScriptedWorker, working
from tests.unit.api_texts import bundle, codec

HELLO = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": CLOCK}, {"type": "function", "function": {"name": "other"}}]


def script(spec: SequenceSpec) -> Answer:
    """Whoever knows a function calls it."""
    return Answer(CALL if "<tools>" in codec().decode(spec.prompt_ids) else "hello")


@pytest.fixture
async def worker(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedWorker]:
    roomy = msgspec.structs.replace(scripted_worker.CARD, context_length=4096)  # what is said of tools is long
    monkeypatch.setattr(scripted_worker, "CARD", roomy)
    async with working(redis_url, script) as playing:
        yield playing


def prompt(worker: ScriptedWorker) -> str:
    return codec().decode(worker.specs[-1].prompt_ids)


async def test_an_answer_goes_on_with_the_last_message(server: Api, worker: ScriptedWorker) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I say "}]
    body = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    answer = await server.post("/v1/chat/completions", body)
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    assert prompt(worker) == "user: hi\nassistant: I say ", "nothing that ends a message stands behind it"
    tokens = (await server.post("/tokenize", body)).json()["tokens"]
    assert codec().decode(tokens) == prompt(worker)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await server.post("/v1/chat/completions", {**body, "messages": [{"role": "assistant", "content": parts}]})
    assert prompt(worker) == "assistant: ab"


async def test_a_prediction_travels_with_the_sequence_and_is_counted(redis_url: str) -> None:
    parts = [{"type": "text", "text": "a b"}, {"type": "text", "text": " c"}]
    finish = Finish("length", accepted_prediction_tokens=3, rejected_prediction_tokens=2)
    async with working(redis_url, lambda spec: Answer("hello", finish)) as worker, api(redis_url) as server:
        for content in ("a b c", parts):
            body = {"messages": HELLO, "prediction": {"type": "content", "content": content}, "n": 2}
            told = (await server.post("/v1/chat/completions", body)).json()["usage"]
            details = {"reasoning_tokens": 0, "accepted_prediction_tokens": 6, "rejected_prediction_tokens": 4}
            assert told["completion_tokens_details"] == details
            assert codec().decode(worker.specs[-1].prediction_ids) == "a b c"
        told = (await server.post("/v1/chat/completions", {"messages": HELLO})).json()["usage"]
        assert "completion_tokens_details" not in told and not worker.specs[-1].prediction_ids
        wrong = {"messages": HELLO, "prediction": {"type": "content", "content": [{"type": "image_url"}]}}
        refused = await server.http.post("/v1/chat/completions", json={"model": MODEL, **wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("prediction")


@pytest.mark.parametrize(
    ("said", "reasoning", "content"),
    [("<think>so ", "hel", "lo"), ("<think>a</think>so ", None, "hel</think>lo")],
)
async def test_a_continued_message_may_end_inside_reasoning(
    redis_url: str, said: str, reasoning: str | None, content: str
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# <think></think> #}"
    shown = TokenizerBundle(bundle().tokenizer_json, template, bundle().eos_token_ids, bundle().special_tokens)
    async with working(redis_url, lambda spec: Answer("hel</think>lo")), api(redis_url) as server:
        served = await server.ring.served(None)
        server.ring.codecs._codecs[served.card.tokenizer_sha256].result().__dict__.update(TextCodec(shown).__dict__)
        body = {"messages": [{"role": "assistant", "content": said}], "continue_final_message": True}
        message = (await server.post("/v1/chat/completions", body)).json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


async def test_a_chat_is_counted_with_its_tools(server: Api, worker: ScriptedWorker) -> None:
    body = {"messages": HELLO, "tools": TOOLS}
    await server.post("/v1/chat/completions", body)
    counted = (await server.post("/tokenize", body)).json()
    assert codec().decode(counted["tokens"]) == prompt(worker)
    assert counted["tokens"] == list(worker.specs[-1].prompt_ids)
    refused = (await server.post("/tokenize", {"prompt": "hi", "tools": TOOLS})).json()["error"]
    assert refused["param"] == "tools"


async def test_allowed_tools_are_those_that_the_model_is_told_of(server: Api, worker: ScriptedWorker) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    choice = (await server.post("/v1/chat/completions", body)).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "clock"
    assert '"clock"' in prompt(worker) and '"other"' not in prompt(worker)
    assert "clock" in worker.specs[-1].sampling.grammar and "other" not in worker.specs[-1].sampling.grammar
    allowed["mode"] = "auto"
    await server.post("/v1/chat/completions", body)
    assert not worker.specs[-1].sampling.grammar
    allowed["tools"] = [{"type": "function", "function": {"name": "nobody"}}]
    refused = (await server.post("/v1/chat/completions", body)).json()["error"]
    assert refused["param"] == "tool_choice" and "nobody" in refused["message"]


async def test_calls_come_in_the_older_form_to_who_asks_in_it(server: Api, worker: ScriptedWorker) -> None:
    body: dict[str, Any] = {"messages": HELLO, "functions": [CLOCK]}
    choice = (await server.post("/v1/chat/completions", body)).json()["choices"][0]
    call = {"name": "clock", "arguments": '{"zone": "UTC"}'}
    assert choice["finish_reason"] == "function_call"
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None, "function_call": call}
    async with server.stream("/v1/chat/completions", {**body, "function_call": "auto"}) as events:
        chunks = [chunk["choices"][0] for chunk in await events.all()]
    parts = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
    assert "".join(part.get("name", "") for part in parts) == "clock"
    assert "".join(part["arguments"] for part in parts) == call["arguments"]
    assert chunks[-1]["finish_reason"] == "function_call"
    named = (await server.post("/v1/chat/completions", {**body, "function_call": {"name": "clock"}})).json()
    assert worker.specs[-1].sampling.grammar, "it is forced"
    assert named["choices"][0]["finish_reason"] == "stop"


async def test_calls_in_the_older_form_may_stand_in_the_history(server: Api, worker: ScriptedWorker) -> None:
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": {"name": "clock", "arguments": '{"zone": "UTC"}'}},
        {"role": "function", "name": "clock", "content": "noon"},
    ]
    response = await server.post("/v1/chat/completions", {"messages": history})
    assert response.status_code == 200, response.text
    assert '"name": "clock", "arguments": {"zone": "UTC"}' in prompt(worker)
    assert "<tool_response>\nnoon\n</tool_response>" in prompt(worker)


async def test_a_rendered_chat_is_what_the_tokens_route_takes(server: Api, worker: ScriptedWorker) -> None:
    body = {"messages": HELLO, "temperature": 0.5, "stop": "x", "max_tokens": 9, "logprobs": True, "request_id": "r"}
    rendered = (await server.post("/v1/chat/completions/render", body)).json()
    assert not worker.specs, "nothing is generated"
    assert codec().decode(rendered["token_ids"]) == "user: hi\n"
    assert rendered["request_id"] == "r"
    answer = await server.post("/inference/v1/generate", rendered)
    assert answer.status_code == 200, answer.text
    sampling = worker.specs[-1].sampling
    assert (sampling.temperature, sampling.stop, sampling.max_tokens) == (0.5, ("x",), 9)
    assert answer.json()["choices"][0]["logprobs"]["content"]
    constrained = await server.post("/v1/chat/completions/render", {**body, "response_format": {"type": "json_object"}})
    assert (constrained.status_code, constrained.json()["error"]["param"]) == (400, "response_format")


async def test_a_server_tells_what_it_is(server: Api) -> None:
    async def got(path: str) -> Any:
        response = await server.http.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    assert (await got("/version"))["version"] == version()
    assert await got("/load") == {"server_load": 0}
    info = await got("/server_info")
    assert info["models"][0]["name"] == MODEL and info["limits"]["pause_new_requests"] == "wait"
    assert not {"redis", "api_key", "sources"} & {*info["limits"], *info["models"][0]}
    tokenizer = await got("/tokenizer_info")
    assert tokenizer["chat_template"] == bundle().chat_template and tokenizer["eos_token"] == "<eos>"
    for method in ("GET", "POST"):
        pinged = await server.http.request(method, "/ping")
        assert (pinged.status_code, pinged.content) == (200, b"")


async def test_a_server_without_workers_does_not_answer_a_ping_with_yes(redis_url: str) -> None:
    async with api(redis_url, api_key="secret") as lonely:
        assert (await lonely.http.get("/ping")).status_code == 503, "and it needs no key, as no probe does"
        assert (await lonely.http.get("/server_info")).status_code == 401


async def test_what_no_model_here_has_is_refused_and_why(server: Api, worker: ScriptedWorker) -> None:
    for path, body, param, said in (
        ("/classify", {"input": "x"}, "labels", "no classifier"),
        ("/pooling", {"input": "x", "task": "token_embed"}, "task", "head"),
        ("/pooling", {"input": "x", "task": "classify"}, "task", "head"),
        ("/score", {"text_1": "x"}, "text_2", "exactly one"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["a", "b", "c"]}, "text_1", "2 texts with 3"),
        ("/score", {"queries": "x", "text_1": "y", "text_2": "z"}, "text_1", "exactly one"),
        ("/rerank", {"query": "x", "documents": []}, "documents", "at least 1"),
        ("/rerank", {"query": "x", "documents": [{"image": "y"}]}, "documents[0]", "string"),
    ):
        refused = await server.post(path, body)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param), (path, body, error)
        assert said in error["message"], error
    assert not worker.specs
