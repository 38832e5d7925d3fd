"""What we answer has OpenAI's shapes: every field known, every type right; and /v1/responses through the client."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from tests.e2e.openai_shapes import exact
from tests.e2e.rings import MODEL, Ring
from tests.waiting import HANG_S

HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "seed": 1}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
FLAT = {"type": "function", "name": "get_weather", "parameters": CITY}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}}
OURS = {"type": "namespace", "name": "tools", "description": "Ours.", "tools": [FLAT, PATCH]}
SPACED = [OURS, {"type": "web_search"}]


@pytest.fixture
def http(served: Ring):
    with httpx.Client(base_url=served.openai_url, timeout=HANG_S) as made:
        yield made


@pytest.fixture
def client(served: Ring):
    with OpenAI(base_url=served.openai_url, api_key="none", max_retries=0) as made:
        yield made


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[Any]:
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2, "logprobs": True, "top_logprobs": 2},
    {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 300},
    {"tools": [WEATHER]},
    {"response_format": {"type": "json_object"}},
    {"logit_bias": {"5": -100}, "user": "me", "metadata": {"a": "b"}, "stop": ["zz"]},
]


@pytest.mark.parametrize("fields", CHATS, ids=lambda fields: ",".join(fields))
def test_chats(http: httpx.Client, fields: dict[str, Any]) -> None:
    exact(ChatCompletion, post(http, "/chat/completions", {**HELLO, **fields}))
    usage = {"stream_options": {"include_usage": True}}
    chunks = [exact(ChatCompletionChunk, each) for each in streamed(http, "/chat/completions", HELLO | fields | usage)]
    assert chunks[-1].usage is not None and chunks[-2].choices[0].finish_reason


def test_completions_embeddings_and_models(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 8}
    exact(Completion, post(http, "/completions", body | {"logprobs": 2}))
    *chunks, last = streamed(http, "/completions", body)
    exact(Completion, last)
    for each in chunks:  # OpenAI's schema has no null for it, its streams do
        assert each["choices"][0].pop("finish_reason") is None
        exact(Completion, {**each, "choices": [{**each["choices"][0], "finish_reason": "stop"}]})
    exact(CreateEmbeddingResponse, post(http, "/embeddings", {"model": MODEL, "input": ["a", "b"]}))
    others = frozenset({".root", ".parent", ".max_model_len", ".version", ".context_length"})  # vLLM's, Codex'
    others |= {".catalogue", ".state", ".progress"}  # our own: a model may be cold
    exact(Model, http.get(f"/models/{MODEL}").json(), ours=others)


RESPONSES: list[dict[str, Any]] = [
    {"input": "hello", "max_output_tokens": 8},
    {"input": "hello", "instructions": "Be brief.", "temperature": 0},
    {"input": "hello", "tools": [FLAT], "tool_choice": "required", "max_output_tokens": 300},
    {"input": "hello", "tools": [FLAT], "tool_choice": {"type": "function", "name": "get_weather"}},
    {"input": "hello", "text": {"format": {"type": "json_schema", "name": "c", "schema": CITY, "strict": True}}},
    {"input": "hello", "chat_template_kwargs": {"enable_thinking": True}, "max_output_tokens": 30},
    {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ],
        "tools": [FLAT],
        "metadata": {"a": "b"},
        "max_output_tokens": 12,
    },
    {"input": "hello", "tools": SPACED, "tool_choice": {"type": "function", "name": "get_weather"}},
    {"input": "hello", "tools": SPACED, "tool_choice": {"type": "custom", "name": "patch"}, "service_tier": "flex"},
    {"input": "hello", "tools": SPACED, "include": ["reasoning.encrypted_content"], "max_output_tokens": 24},
]


@pytest.mark.parametrize("fields", RESPONSES, ids=lambda fields: ",".join(fields))
def test_responses_and_their_streams(http: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"model": MODEL, "seed": 3, "max_output_tokens": 200, **fields}
    whole = post(http, "/responses", body)
    exact(Response, whole)
    events = list(streamed(http, "/responses", body))
    for event in events:  # the published schema demands `name`, the package has not got it yet
        exact(ResponseStreamEvent, event, ours=frozenset({".name"}))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert _without_ids(last["response"]) == _without_ids(whole)
    _check_growth(events)


def _without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    kept = {k: v for k, v in response.items() if k not in ("id", "created_at", "usage")}
    return {**kept, "output": items, "tokens": response["usage"]["output_tokens"]}


def _check_growth(events: list[dict[str, Any]]) -> None:
    """Deltas add up to what is done, and every item that is added is done."""
    texts: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        if event["type"] in ("response.output_text.done", "response.reasoning_text.done"):
            assert event["text"] == texts.get(event["item_id"], "")
        if event["type"] == "response.function_call_arguments.done":
            assert event["arguments"] == texts[event["item_id"]]
    kinds = [event["type"] for event in events]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") > 0


def test_the_client_reads_text_calls_and_streams(client: OpenAI) -> None:
    text = client.responses.create(model=MODEL, input="hello", max_output_tokens=24, temperature=0)
    assert text.output_text
    forced = client.responses.create(model=MODEL, input="hello", tools=[FLAT], tool_choice="required")
    calls = [item for item in forced.output if item.type == "function_call"]
    assert calls and all(json.loads(call.arguments)["city"] in ("Rome", "Oslo") for call in calls)
    again = client.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": "hello"},
            *[item.model_dump(exclude_none=True) for item in forced.output],
            *[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls],
        ],
        tools=[FLAT],
        max_output_tokens=8,
    )
    assert again.usage is not None and again.usage.input_tokens > forced.usage.input_tokens  # type: ignore[union-attr]
    with client.responses.stream(model=MODEL, input="hello", max_output_tokens=24, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == text.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "previous_response_id"),
        ({"background": True, "store": False}, "background"),
        ({"input": [{"type": "item_reference"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "foo"}}}}, "text.format"),
        ({"nonsense": 1}, "nonsense"),
        ({"max_output_tokens": 1_000_000}, "max_output_tokens"),
    ],
)
def test_what_we_cannot_do_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post("/responses", json={"model": MODEL, "input": "hello", **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


def test_an_error_in_the_stream_is_a_failed_response(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=MODEL, input="hello", max_output_tokens=1_000_000, stream=True)
