"""Anthropic's Messages against real processes: greedy answers, forced tools, and Claude Code's requests."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.e2e.rings import Ring
from tests.waiting import HANG_S, wait_until

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"name": "get_weather", "description": "weather", "input_schema": SCHEMA},
    {"name": "clock", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]
HELLO = [{"role": "user", "content": "hello"}]
PATH = "/v1/messages"


@pytest.fixture(scope="module")
def http(served: Ring) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=HANG_S) as client:
        yield client


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "claude-tiny", "messages": HELLO, "max_tokens": 300, "temperature": 0, **fields}
    answer = http.post(PATH, params={"beta": "true"}, json=body)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()
    return message


def test_a_greedy_stream_says_what_the_whole_answer_says(http: httpx.Client) -> None:
    whole = ask(http)
    assert (whole["model"], whole["stop_reason"]) == ("claude-tiny", "end_turn")
    assert len(whole["content"][0]["text"]) > 12
    body = {"model": "claude-tiny", "messages": HELLO, "max_tokens": 300, "temperature": 0, "stream": True}
    with http.stream("POST", PATH, json=body) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_stop_sequence_ends_the_answer_and_a_prefill_begins_it(http: httpx.Client) -> None:
    text = ask(http)["content"][0]["text"]
    stop = text[6:10]
    ended = ask(http, stop_sequences=[stop])
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", stop)
    assert ended["content"][0]["text"] == text[:6]
    limit = ask(http, max_tokens=3)
    assert (limit["stop_reason"], limit["usage"]["output_tokens"]) == ("max_tokens", 3)
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    prompt = ask(http, messages=begun, max_tokens=1)["usage"]
    counted = http.post(f"{PATH}/count_tokens", json={"model": "claude-tiny", "messages": begun}).json()
    assert counted["input_tokens"] == prompt["input_tokens"] + prompt["cache_read_input_tokens"]


@pytest.mark.parametrize("choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": ""}])
def test_a_forced_tool_gets_an_input_of_its_schema(http: httpx.Client, choice: dict[str, Any]) -> None:
    choice = {**choice, "name": "get_weather"} if "name" in choice else choice
    answer = ask(http, tools=TOOLS, tool_choice=choice, temperature=1.0, seed=3)
    (use,) = answer["content"]
    assert (use["type"], answer["stop_reason"]) == ("tool_use", "tool_use")
    jsonschema.validate(use["input"], SCHEMA if use["name"] == "get_weather" else TOOLS[1]["input_schema"])
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "sunny"}]}
    turns = [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert ask(http, tools=TOOLS, messages=turns, max_tokens=4)["usage"]["output_tokens"] > 0


def test_an_answer_follows_the_schema_of_its_output_format(http: httpx.Client) -> None:
    wanted = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = ask(http, output_config=wanted, temperature=1.0, seed=5)
    jsonschema.validate(json.loads(answer["content"][-1]["text"]), SCHEMA)


def test_claude_code_s_changing_first_line_does_not_cost_the_cached_prompt(http: httpx.Client) -> None:
    """Its system prompt begins with a line whose hash is another one in each request."""

    def request(nonce: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
        ephemeral = {"cache_control": {"type": "ephemeral"}}
        line = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={nonce};"
        system = [
            {"type": "text", "text": line},
            {"type": "text", "text": "You are a coding agent.", **ephemeral},
            {"type": "text", "text": "\n".join(f"Rule {at}: 1{at}+2{at}=3{at}." for at in range(40)), **ephemeral},
        ]
        return ask(
            http,
            system=system,
            tools=TOOLS,
            messages=turns,
            metadata={"user_id": f"user_{nonce}_session"},
            thinking={"type": "adaptive"},
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            max_tokens=4,
        )

    first = request("fa690", HELLO)
    prompt = first["usage"]["input_tokens"] + first["usage"]["cache_read_input_tokens"]
    assert prompt > 500, "a long one"
    turns = [*HELLO, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "12+35="}]
    second = request("eb6c6", turns)["usage"]
    assert second["cache_read_input_tokens"] > 0.85 * prompt
    assert second["input_tokens"] < 0.3 * prompt


def test_a_message_batch_answers_what_the_endpoint_answers(http: httpx.Client) -> None:
    asked = {"model": "claude-tiny", "messages": HELLO, "max_tokens": 24, "temperature": 0}
    requests = {
        "plain": asked,
        "stopped": {**asked, "stop_sequences": ["e"], "system": "Be brief."},
        "forced": {**asked, "tools": TOOLS[1:], "tool_choice": {"type": "any"}, "max_tokens": 300},
        "shaped": {**asked, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 300},
        "nothing": {**asked, "max_tokens": 0},
        "streamed": {**asked, "stream": True},
        "unknown": {**asked, "container": "c"},
        "long": {**asked, "messages": [{"role": "user", "content": "a " * 5000}]},
        "large": {**asked, "messages": [{"role": "user", "content": "a " * 600_000}]},
    }
    listed = [{"custom_id": name, "params": params} for name, params in requests.items()]
    made = http.post(f"{PATH}/batches?beta=true", json={"requests": listed}).json()
    one = f"{PATH}/batches/{made['id']}"
    asyncio.run(wait_until(lambda: http.get(one).json()["processing_status"] == "ended"))
    batch = http.get(one).json()
    counts = {"processing": 0, "succeeded": 5, "errored": 4, "canceled": 0, "expired": 0}
    assert batch["request_counts"] == counts
    assert batch["created_at"] <= batch["ended_at"] < batch["expires_at"]
    answer = http.get(batch["results_url"])
    results = {each["custom_id"]: each["result"] for each in map(json.loads, answer.text.splitlines())}
    assert list(results) == list(requests)
    for name, result in results.items():
        alone = http.post(PATH, json={**requests[name], "stream": False})
        if result["type"] == "errored" and name != "streamed":
            assert result["error"]["error"] == alone.json()["error"], name
        elif name != "streamed":
            assert said(result["message"]) == said(alone.json()), name
            assert result["message"]["usage"]["service_tier"] == "batch"
    assert "stream" in results["streamed"]["error"]["error"]["message"]
    job = http.get("/v1/jobs").json()["data"][0]["id"]
    assert http.delete(one).json()["type"] == "message_batch_deleted"
    assert [http.get(path).status_code for path in (one, f"{one}/results", f"/v1/jobs/{job}")] == [404, 404, 404]
    assert http.get("/v1/files").json()["data"] == []


def said(message: dict[str, Any]) -> Any:
    """What is the same in each answer to a request."""
    blocks = [{**block, "id": ""} if block["type"] == "tool_use" else block for block in message["content"]]
    return message["model"], message["stop_reason"], message["stop_sequence"], blocks, message["usage"]["output_tokens"]
