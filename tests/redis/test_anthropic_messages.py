"""Anthropic's Messages against a worker that says what a script tells it: shapes, events, stop reasons, errors."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from api.http.api_keys import line_of
from shared.frames import Finish
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.sequences import SequenceSpec
from shared.text.codec import TokenizerBundle
from tests.redis import scripted_worker
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import CARD, MODEL, Answer, ScriptedWorker, working
from tests.unit.api_texts import bundle, codec
from tests.waiting import wait_until

TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% if enable_thinking is defined and not enable_thinking -%}
<think></think>{% endif %}{% endif %}"""
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
CLOCK = {"name": "clock", "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}}}
USED = {"type": "tool_use", "name": "clock", "input": {"zone": "UTC"}}
THOUGHT = len("<think>so so</think>")  # a letter is a token
PATH = "/v1/messages"
ANSWERS = {
    "say": Answer("hello", Finish("stop", cached_tokens=3)),
    "think": Answer("<think>so so</think>\n\nhello"),
    "call": Answer(f"<think>I look</think>Now: {CALL}"),
    "end": Answer("hello ", Finish("stop", stop_match="END")),
    "long": Answer("hello", Finish("length")),
    "fail": Answer("he", Finish("error", error_code="engine_error", error_message="broken")),
    "hold": Answer("hello", hold_at=2),
    "nothing": Answer(""),
}


def script(spec: SequenceSpec) -> Answer:
    """By the last word of the prompt."""
    said = codec().decode(spec.prompt_ids).removesuffix("assistant: ").removesuffix("assistant: <think></think>")
    return ANSWERS[said.split()[-1]]


@pytest.fixture
async def worker(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedWorker]:
    plain = bundle()
    shown = TokenizerBundle(plain.tokenizer_json, TEMPLATE, plain.eos_token_ids, plain.special_tokens)
    roomy = msgspec.structs.replace(scripted_worker.CARD, context_length=4096, tokenizer_sha256=shown.sha256)
    monkeypatch.setattr(scripted_worker, "bundle", lambda: shown)
    monkeypatch.setattr(scripted_worker, "CARD", roomy)
    async with working(redis_url, script) as playing:
        yield playing


def body(word: str, **fields: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": word}]
    return {"model": MODEL, "max_tokens": 200, "messages": turns, "thinking": {"type": "adaptive"}, **fields}


async def whole(server: Api, word: str, **fields: Any) -> dict[str, Any]:
    answer = await server.post(PATH, body(word, **fields))
    assert answer.status_code == 200, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    message = answer.json()
    assert message["id"].startswith("msg_") and message["type"] == "message" and message["role"] == "assistant"
    return message


async def streamed(server: Api, word: str, **fields: Any) -> list[dict[str, Any]]:
    """The events, each under the name that its data has, too."""
    events = []
    async with server.http.stream("POST", f"{PATH}?beta=true", json=body(word, stream=True, **fields)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line:
                events.append(json.loads(line.removeprefix("data: ")))
                assert events[-1]["type"] == name
    return events


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream add up to, as the SDKs do it."""
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        "message_start", "message_delta", "message_stop"
    ]  # fmt: skip
    message, arguments = events[0]["message"], ""
    for event in events[1:-2]:
        block = event.get("content_block") or (message["content"][-1] if message["content"] else {})
        if event["type"] == "content_block_start":
            message["content"].append(block)
            arguments = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "content_block_stop" and block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    message["usage"] |= events[-2]["usage"]
    return {**message, **events[-2]["delta"]}


def told(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what is of its request alone."""
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**{name: value for name, value in message.items() if name != "id"}, "content": blocks}


async def test_a_stream_adds_up_to_the_whole_message(server: Api) -> None:
    for word in ("say", "think", "call", "end", "long", "nothing"):
        events = await streamed(server, word, tools=[CLOCK])
        assert told(accumulated(events)) == told(await whole(server, word, tools=[CLOCK])), word
        assert [event["type"] for event in events][:2] == ["message_start", "ping"]


@pytest.mark.parametrize(("word", "thought"), [("think", THOUGHT), ("say", 0)])
async def test_tokens_of_reasoning_are_counted_alike_everywhere(server: Api, word: str, thought: int) -> None:
    messages = [{"role": "user", "content": word}]
    for hidden in ({}, {"include_reasoning": False}):
        answer = await server.post("/v1/chat/completions", {"messages": messages, "n": 2, **hidden})
        details = answer.json()["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == 2 * thought
    usage = {"include_usage": True}
    async with server.stream("/v1/chat/completions", {"messages": messages, "stream_options": usage}) as events:
        counts = [chunk["usage"] for chunk in await events.all() if chunk.get("usage")]
    assert [count["completion_tokens_details"]["reasoning_tokens"] for count in counts] == [thought]
    answer = await server.post("/v1/responses", {"input": word})
    assert answer.json()["usage"]["output_tokens_details"]["reasoning_tokens"] == thought


async def test_answers_have_anthropic_s_blocks_stop_reasons_and_usage(server: Api, worker: ScriptedWorker) -> None:
    said = await whole(server, "say")
    prompt = len(worker.specs[-1].prompt_ids)
    assert said["content"] == [{"type": "text", "text": "hello"}]
    assert (said["stop_reason"], said["stop_sequence"]) == ("end_turn", None)
    counts = {name: said["usage"][name] for name in ("input_tokens", "cache_read_input_tokens", "output_tokens")}
    assert counts == {"input_tokens": prompt - 3, "cache_read_input_tokens": 3, "output_tokens": 6}
    thought = await whole(server, "think")
    assert [block["type"] for block in thought["content"]] == ["thinking", "text"]
    assert (thought["content"][0]["thinking"], thought["content"][1]["text"]) == ("so so", "hello")
    assert (
        thought["content"][0]["signature"] and thought["usage"]["output_tokens_details"]["thinking_tokens"] == THOUGHT
    )
    called = await whole(server, "call", tools=[CLOCK])
    assert [block["type"] for block in called["content"]] == ["thinking", "text", "tool_use"]
    assert told(called)["content"][2] == USED and called["stop_reason"] == "tool_use"
    assert called["content"][2]["id"].startswith("toolu_")
    ended = await whole(server, "end", stop_sequences=["END"])
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", "END")
    assert worker.specs[-1].sampling.stop == ("END",)
    assert (await whole(server, "long"))["stop_reason"] == "max_tokens"
    assert (await whole(server, "nothing"))["content"] == []


async def test_a_choice_of_no_tools_hides_them_from_the_model(server: Api, worker: ScriptedWorker) -> None:
    for choice, shown in (("auto", True), ("none", False)):
        await whole(server, "say", tools=[CLOCK], tool_choice={"type": choice})
        assert ("clock" in codec().decode(worker.specs[-1].prompt_ids)) == shown


async def test_thinking_is_switched_and_shown_as_it_is_asked_for(server: Api, worker: ScriptedWorker) -> None:
    await whole(server, "say", thinking={"type": "disabled"})
    assert codec().decode(worker.specs[-1].prompt_ids).endswith("<think></think>")
    await whole(server, "say", thinking=None)
    assert codec().decode(worker.specs[-1].prompt_ids).endswith("<think></think>"), "unasked there is none"
    for display in ("omitted", "updates"):
        hidden = await whole(server, "think", thinking={"type": "adaptive", "display": display})
        assert hidden["content"][0]["thinking"] == "" and hidden["content"][0]["signature"]
    answer = await server.post(PATH, body("say", thinking={"type": "enabled", "budget_tokens": 1024}))
    assert answer.headers["x-parallm-unused-parameters"] == "thinking.budget_tokens"
    effort = await server.post(PATH, body("say", output_config={"effort": "high"}))
    assert effort.headers["x-parallm-unused-parameters"] == "output_config.effort"


async def test_more_tokens_than_the_context_leaves_are_those_that_it_leaves(
    server: Api, worker: ScriptedWorker
) -> None:
    full = await whole(server, "long", max_tokens=64_000)
    assert full["stop_reason"] == "model_context_window_exceeded"
    assert worker.specs[-1].sampling.max_tokens == 4096 - len(worker.specs[-1].prompt_ids)
    refused = await server.post(PATH, body("a" * 5000))
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("prompt is too long: 50"), "clients shorten on these words"


async def test_a_prompt_that_no_workers_memory_holds_is_too_long(server: Api, worker: ScriptedWorker) -> None:
    worker.kv_limit_bytes = 90 * CARD.kv_bytes_per_token
    await worker.join()

    async def is_known() -> bool:
        refused = await server.post(PATH, body("a" * 200))
        return bool(refused.status_code == 400 and refused.json()["error"]["message"].endswith("tokens > 89 maximum"))

    await wait_until(is_known)
    assert (await whole(server, "say"))["content"]


async def test_no_tokens_at_all_read_the_prompt_into_the_cache(server: Api, worker: ScriptedWorker) -> None:
    read = await whole(server, "say", max_tokens=0)
    assert (read["content"], read["stop_reason"], read["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert worker.specs[-1].sampling.max_tokens == 1
    assert told(accumulated(await streamed(server, "say", max_tokens=0))) == told(read)


async def test_what_has_begun_is_gone_on_with(server: Api, worker: ScriptedWorker) -> None:
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I say"}]
    assert (await whole(server, "", messages=begun))["content"] == [{"type": "text", "text": "hello"}]
    assert codec().decode(worker.specs[-1].prompt_ids) == "user: hi\nassistant: I say"


async def test_tokens_are_counted_as_a_message_reads_them(server: Api, worker: ScriptedWorker) -> None:
    prompt = {"system": [{"type": "text", "text": "s"}], "tools": [CLOCK], "thinking": {"type": "disabled"}}
    counted = {name: value for name, value in body("say", **prompt).items() if name != "max_tokens"}
    answer = await server.post(f"{PATH}/count_tokens?beta=true", counted)
    usage = (await whole(server, "say", **prompt))["usage"]
    assert answer.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert len(worker.specs) == 1, "counting generates nothing"


async def test_claude_code_finds_the_server_and_goes_on_without_what_is_refused(
    redis_url: str, worker: ScriptedWorker, tmp_path: Path
) -> None:
    (file := tmp_path / "keys").write_text(line_of("a-key-that-is-long-enough"))
    async with api(redis_url, api_key_file=file) as server:
        for method in ("HEAD", "GET"):
            assert (await server.http.request(method, "/api/hello")).status_code == 200, "without a key"
        mine = {"headers": {"x-api-key": "a-key-that-is-long-enough"}}
        safeguards = [{"type": "dangerous_tool_use", "classifier_context": {"v": 1, "permission_mode": "auto"}}]
        refused = await server.post(PATH, body("say", safeguards=safeguards), **mine)
        assert error_of(refused) == (400, "invalid_request_error")
        assert "'safeguards'" in refused.json()["error"]["message"], "by this word it knows what to leave out"


def error_of(answer: Any) -> tuple[int, str]:
    told = answer.json()
    assert told["type"] == "error" and told["error"]["message"]
    assert told["request_id"] == answer.headers["request-id"]
    return answer.status_code, told["error"]["type"]


async def test_errors_have_anthropic_s_shape_whoever_refuses(
    redis_url: str, worker: ScriptedWorker, tmp_path: Path
) -> None:
    file, key = tmp_path / "keys", "a-key-that-is-long-enough"
    file.write_text(line_of(key, concurrent="1"))
    async with api(redis_url, api_key_file=file, max_request_bytes=4096) as server:
        assert error_of(await server.post(PATH, body("say"))) == (401, "authentication_error")
        wrong = {"headers": {"x-api-key": "wrong"}}
        assert error_of(await server.post(PATH, body("say"), **wrong)) == (401, "authentication_error")
        mine = {"headers": {"x-api-key": key, "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}}
        assert (await server.post(PATH, body("say"), **mine)).status_code == 200
        assert error_of(await server.post(PATH, body("say", model="x"), **mine)) == (404, "not_found_error")
        assert error_of(await server.post(PATH, body("say", x=1), **mine)) == (400, "invalid_request_error")
        assert error_of(await server.post(PATH, body("a" * 5000), **mine)) == (413, "request_too_large")
        assert error_of(await server.post(f"{PATH}/nothing", {}, **mine)) == (404, "not_found_error")
        assert error_of(await server.http.get(PATH, **mine)) == (405, "invalid_request_error")
        assert error_of(await server.http.get("/v1/models/x", **mine)) == (404, "not_found_error")
        held = asyncio.create_task(server.post(PATH, body("hold"), **mine))
        await wait_until(lambda: len(worker.specs) == 2)
        busy = await server.post(PATH, body("say"), **mine)
        assert error_of(busy) == (429, "rate_limit_error") and int(busy.headers["retry-after"]) >= 1
        worker.go.set()
        assert (await held).status_code == 200
        bearer = {"headers": {"authorization": f"Bearer {key}"}}
        assert (await server.post("/v1/chat/completions", {"messages": []}, **bearer)).json()["error"]["code"] is None


async def test_a_model_without_a_worker_is_overloaded(redis_url: str, redis: Redis) -> None:
    await WorkerRegistry(redis).register_model(scripted_worker.CARD, bundle())
    async with api(redis_url) as server:
        answer = await server.post(PATH, body("say"))
    assert error_of(answer) == (529, "overloaded_error") and int(answer.headers["retry-after"]) >= 1


async def test_a_stream_that_breaks_says_so_in_an_event(server: Api) -> None:
    events = await streamed(server, "fail")
    assert events[-1]["type"] == "error" and "message_stop" not in {event["type"] for event in events}
    assert events[-1]["error"] == {"type": "api_error", "message": "broken"}
    assert events[-1]["request_id"].startswith("req_")
    assert error_of(await server.post(PATH, body("fail"))) == (500, "api_error")


async def test_silence_is_filled_with_pings(
    server: Api, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("api.anthropic.routes.PING_EVERY_S", "api.generation.running.SILENCE_S"):
        monkeypatch.setattr(name, 0.01)
    worker.paused = True
    lines: list[str] = []
    async with server.http.stream("POST", PATH, json=body("say", stream=True)) as response:
        async for line in response.aiter_lines():
            lines += [line] if line.startswith("event: ") else []
            worker.paused = lines.count("event: ping") < 4
    assert lines[:5] == ["event: message_start", *["event: ping"] * 4]
    assert lines[-1] == "event: message_stop"


async def test_a_client_that_leaves_ends_its_sequence(server: Api, worker: ScriptedWorker) -> None:
    async with server.http.stream("POST", PATH, json=body("hold", stream=True)) as response:
        async for line in response.aiter_lines():
            if "content_block_delta" in line:
                break
    await wait_until(lambda: len(worker.cancelled) == 1)


async def test_models_are_listed_in_anthropic_s_shape_to_who_says_its_version(server: Api) -> None:
    version = {"headers": {"anthropic-version": "2023-06-01"}}
    listed = (await server.http.get("/v1/models", **version)).json()
    (model,) = listed["data"]
    assert (model["type"], model["id"], model["max_input_tokens"]) == ("model", MODEL, 4096)
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, MODEL, MODEL)
    assert (await server.http.get(f"/v1/models/{MODEL}", **version)).json() == model
    assert (await server.http.get("/v1/models")).json()["object"] == "list"
