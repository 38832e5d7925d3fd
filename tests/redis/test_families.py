"""Families of models whose language is their own, through every endpoint that shows reasoning and calls."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from shared.text.codec import TokenizerBundle
from tests.redis import scripted_worker
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import Answer, ScriptedWorker, working
from tests.unit.api_texts import bundle, codec
from tests.unit.test_fitting import FIRST, MISTRAL, THINKING

HELLO = [{"role": "user", "content": "hi"}]
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": CLOCK}]
GEMMA = "{# tools <|tool_call> <tool_call|> #}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
HARMONY_TEXT = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"zone": "UTC"}'
)
GEMMA_TEXT = '<|channel>thought\nHm.\n<channel|>I look.<|tool_call>call:clock{zone:<|"|>UTC<|"|>}<tool_call|>'
FAMILIES = pytest.mark.parametrize(
    ("template", "text"), [(THINKING, HARMONY_TEXT), (GEMMA, GEMMA_TEXT)], ids=["harmony", "gemma4"]
)
READ = ("Hm.", "I look.", "clock", {"zone": "UTC"})


@contextlib.asynccontextmanager
async def served(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, template: str, text: str
) -> AsyncIterator[tuple[Api, ScriptedWorker]]:
    """A ring whose model has this template and writes this text."""
    shown = TokenizerBundle(bundle().tokenizer_json, template, bundle().eos_token_ids, bundle().special_tokens)
    roomy = msgspec.structs.replace(scripted_worker.CARD, context_length=4096, tokenizer_sha256=shown.sha256)
    monkeypatch.setattr(scripted_worker, "bundle", lambda: shown)
    async with working(redis_url, lambda spec: Answer(text), roomy) as worker, api(redis_url) as server:
        yield server, worker


def prompt(worker: ScriptedWorker) -> str:
    return codec().decode(worker.specs[-1].prompt_ids)


@FAMILIES
async def test_a_chat_is_taken_apart_whole_and_streamed(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, template: str, text: str
) -> None:
    async with served(redis_url, monkeypatch, template, text) as (server, _):
        body = {"messages": HELLO, "tools": TOOLS}
        choice = (await server.post("/v1/chat/completions", body)).json()["choices"][0]
        async with server.stream("/v1/chat/completions", body) as events:
            chunks = [chunk["choices"][0] for chunk in await events.all()]
    message, (call,) = choice["message"], choice["message"]["tool_calls"]
    function = call["function"]
    whole = message["reasoning_content"], message["content"], function["name"], json.loads(function["arguments"])
    assert whole == READ and choice["finish_reason"] == "tool_calls"
    deltas = [chunk["delta"] for chunk in chunks]
    thought, said = ("".join(each.get(name) or "" for each in deltas) for name in ("reasoning_content", "content"))
    streamed = [each["tool_calls"][0]["function"] for each in deltas if "tool_calls" in each]
    assert streamed[0]["name"] == "clock" and len(streamed) > 3, "a call comes as it grows, its name first"
    assert not any(each.get("name") for each in streamed[1:])
    assert (thought, said, json.loads("".join(each["arguments"] for each in streamed))) == (*READ[:2], READ[3])
    assert chunks[-1]["finish_reason"] == "tool_calls"
    assert sum("reasoning_content" in each for each in deltas) > 1, "reasoning comes as it grows"


@FAMILIES
async def test_responses_and_messages_show_the_same(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, template: str, text: str
) -> None:
    async with served(redis_url, monkeypatch, template, text) as (server, _):
        asked = {"input": "hi", "tools": [{"type": "function", **CLOCK}]}
        items = (await server.post("/v1/responses", asked)).json()["output"]
        tool = {"name": "clock", "input_schema": CLOCK["parameters"]}
        message = {"model": "scripted", "max_tokens": 500, "messages": HELLO, "tools": [tool]}
        message["thinking"] = {"type": "adaptive"}
        blocks = (await server.post("/v1/messages", message)).json()["content"]
    thought, said, call = items
    shown = thought["content"][0]["text"], said["content"][0]["text"], call["name"], json.loads(call["arguments"])
    assert shown == READ
    thinking, words, use = blocks
    assert (thinking["thinking"], words["text"], use["name"], use["input"]) == READ


async def test_a_tool_loop_goes_on_with_our_own_ids(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[TOOL_CALLS]clock[ARGS]{"zone": "UTC"}'
    async with served(redis_url, monkeypatch, MISTRAL + "{# [TOOL_CALLS] #}", text) as (server, worker):
        body = {"messages": HELLO, "tools": TOOLS}
        message = (await server.post("/v1/chat/completions", body)).json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "noon"}
        more = await server.post("/v1/chat/completions", {**body, "messages": [*HELLO, message, result]})
        assert more.status_code == 200, more.text
        by_chat = prompt(worker)

        asked = {"tools": [{"type": "function", **CLOCK}]}
        first = (await server.post("/v1/responses", {**asked, "input": "hi"})).json()
        (call,) = first["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
        again = {**asked, "input": [output], "previous_response_id": first["id"]}
        more = await server.post("/v1/responses", again)
        assert more.status_code == 200, more.text
        by_response = prompt(worker)

        tool = {"name": "clock", "input_schema": CLOCK["parameters"]}
        asked = {"model": "scripted", "max_tokens": 99, "tools": [tool]}
        blocks = (await server.post("/v1/messages", {**asked, "messages": HELLO})).json()["content"]
        found = {"type": "tool_result", "tool_use_id": blocks[0]["id"], "content": "noon"}
        turns = [*HELLO, {"role": "assistant", "content": blocks}, {"role": "user", "content": [found]}]
        more = await server.post("/v1/messages", {**asked, "messages": turns})
        assert more.status_code == 200, more.text
    for shown in (by_chat, by_response, prompt(worker)):
        name = shown.partition("[clock ")[2][:9]
        assert name.isalnum() and f"tool: noon ({name})" in shown


async def test_several_messages_of_the_system_reach_every_endpoint_s_model(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    system: list[dict[str, Any]] = [{"role": "system", "content": "one"}, {"role": "developer", "content": "two"}]
    late = [*HELLO, {"role": "system", "content": "late"}]
    async with served(redis_url, monkeypatch, FIRST, "hello") as (server, worker):
        for path, body in (
            ("/v1/chat/completions", {"messages": [*system, *late]}),
            ("/v1/responses", {"input": [*system, *late]}),
            ("/v1/messages", {"model": "scripted", "max_tokens": 9, "system": "one\n\ntwo", "messages": late}),
        ):
            answer = await server.post(path, body)
            assert answer.status_code == 200, answer.text
            assert prompt(worker) == "system: one\n\ntwo\nuser: hi\nlate\n"


async def test_parts_of_a_schema_that_nothing_enforces_are_named_by_the_answer(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    parameters = {**CLOCK["parameters"], "not": {"required": ["hour"]}}  # type: ignore[dict-item]
    async with served(redis_url, monkeypatch, FIRST, text) as (server, _):
        function = {**CLOCK, "parameters": parameters}
        chat = {"messages": HELLO, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        asked = {"input": "hi", "tools": [{"type": "function", **function}], "tool_choice": "required"}
        tool = {"name": "clock", "input_schema": parameters}
        message = {"model": "scripted", "max_tokens": 99, "messages": HELLO, "tools": [tool]}
        forced = {**message, "tool_choice": {"type": "any"}}
        for path, body in (("/v1/chat/completions", chat), ("/v1/responses", asked), ("/v1/messages", forced)):
            answer = await server.post(path, body)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-parallm-unused-parameters"] == "tools.clock.not"
        assert "x-parallm-unused-parameters" not in (await server.post("/v1/messages", message)).headers


async def test_a_budget_of_reasoning_for_a_model_without_any_is_named_by_the_answer(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(redis_url, monkeypatch, FIRST, "hello") as (server, _):
        for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/responses", {"input": "hi"})):
            answer = await server.post(path, {**body, "max_reasoning_tokens": 8})
            assert (answer.status_code, answer.headers.get("x-parallm-unused-parameters")) == (
                200,
                "max_reasoning_tokens",
            )
