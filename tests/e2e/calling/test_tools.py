"""Tool calls and reasoning through the openai client; the weak model is made to call, its words are what they are."""

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai import OpenAI

from tests.e2e.rings import MODEL, Ring
from tests.waiting import HANG_S

ASK = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "weather", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
BOTH = [WEATHER, CLOCK]


@pytest.fixture
def client(served: Ring):
    with OpenAI(base_url=served.openai_url, api_key="none", max_retries=0) as made:
        yield made


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": ASK, "max_tokens": 400, "seed": 1, **fields})


def check(calls: list[Any]) -> None:
    for call in calls:
        assert call.id and call.type == "function"
        arguments = json.loads(call.function.arguments)
        if call.function.name == "get_weather":
            jsonschema.validate(arguments, SCHEMA)
        else:
            assert (call.function.name, arguments) == ("clock", {})
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize("seed", range(3))
def test_required_brings_calls_with_valid_arguments(client: OpenAI, seed: int) -> None:
    choice = ask(client, tools=BOTH, tool_choice="required", parallel_tool_calls=False, seed=seed).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert len(choice.message.tool_calls) == 1
    check(choice.message.tool_calls)


def test_a_named_function_is_the_one_that_is_called(client: OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = ask(client, tools=BOTH, tool_choice=named).choices[0]
    assert choice.finish_reason == "stop"
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    check(choice.message.tool_calls)


def test_streamed_calls_add_up_to_the_whole_ones(client: OpenAI) -> None:
    fields = {"tools": BOTH, "tool_choice": "required", "temperature": 1.3, "seed": 4, "n": 2}
    whole = ask(client, **fields)
    calls: dict[tuple[int, int], dict[str, str]] = {}
    finishes = {}
    for chunk in ask(client, **fields, stream=True):
        for choice in chunk.choices:
            finishes[choice.index] = choice.finish_reason or finishes.get(choice.index)
            for call in choice.delta.tool_calls or []:
                made = calls.setdefault((choice.index, call.index), {"id": "", "name": "", "arguments": ""})
                made["id"] += call.id or ""
                made["name"] += call.function.name or ""
                made["arguments"] += call.function.arguments or ""
    for choice in whole.choices:
        assert finishes[choice.index] == choice.finish_reason
        made = [calls[key] for key in sorted(calls) if key[0] == choice.index]
        shown = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert [(call["name"], call["arguments"]) for call in made] == shown
        assert all(call["id"] for call in made)


def test_the_arguments_of_a_forced_call_come_as_they_grow(client: OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for _ in range(5):
        chunks = ask(client, tools=BOTH, tool_choice=named, stream=True)
        parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        if len(parts) > 1:
            break  # how many depends on how many tokens an api that others keep waiting finds in its stream at once
    assert len(parts) > 1
    assert [bool(part.id) for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.function.name for part in parts if part.function.name] == ["get_weather"]
    assert json.loads("".join(part.function.arguments for part in parts))["city"] in ("Rome", "Oslo")


def test_a_result_goes_back_and_the_chat_goes_on(client: OpenAI) -> None:
    first = ask(client, tools=BOTH, tool_choice="required", parallel_tool_calls=False).choices[0].message
    call = first.tool_calls[0]
    turns = [*ASK, first.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = ask(client, messages=turns, tools=BOTH, max_tokens=24)
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > len("sunny")


def test_auto_leaves_the_choice_to_the_model(client: OpenAI) -> None:
    choice = ask(client, tools=BOTH, max_tokens=24, temperature=0).choices[0]
    assert choice.finish_reason in ("stop", "length") and choice.message.content
    assert choice.message.tool_calls is None


def test_reasoning_is_told_apart(client: OpenAI) -> None:
    """The weak model hardly ever ends a thought; what it may say behind one is forced."""
    wanted = {"structured_outputs": {"choice": ["yes", "no"]}, "chat_template_kwargs": {"enable_thinking": True}}
    choice = ask(client, extra_body=wanted, max_tokens=300, temperature=1.0).choices[0]
    thought = getattr(choice.message, "reasoning_content", None)
    assert thought
    assert choice.finish_reason == "length" or choice.message.content in ("yes", "no")
    text = ""
    for chunk in ask(client, extra_body=wanted, max_tokens=300, temperature=1.0, stream=True):
        text += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    assert text == thought


def test_reasoning_can_be_left_out(client: OpenAI) -> None:
    wanted = {"chat_template_kwargs": {"enable_thinking": True}, "include_reasoning": False}
    message = ask(client, extra_body=wanted, max_tokens=8).choices[0].message
    assert message.content == "" and getattr(message, "reasoning_content", None) is None


def test_a_stream_of_calls_resumes_where_it_stopped(served: Ring) -> None:
    body = {
        "model": MODEL, "messages": ASK, "max_tokens": 400, "seed": 4, "temperature": 1.3, "stream": True,
        "tools": BOTH, "tool_choice": "required", "stream_options": {"include_event_ids": True},
    }  # fmt: skip

    def read(lines: Any, until: int | None = None) -> tuple[list[dict[str, Any]], str, str]:
        chunks, last, pending, stream_id = [], "", "", ""
        for line in lines:
            if line.startswith("id: "):
                pending = line[4:]
            elif line.startswith("data: {"):
                last = pending
                chunks.append(json.loads(line[6:]))
                stream_id = chunks[-1]["id"]
                if len(chunks) == until:
                    break
        return chunks, last, stream_id

    def calls(chunks: list[dict[str, Any]]) -> list[Any]:
        """Each call as its parts make it: name, arguments."""
        made: list[list[str]] = []
        for call in [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]:
            if "id" in call:
                assert call["index"] == len(made)
                made.append([call["function"]["name"], ""])
            assert call["index"] == len(made) - 1
            made[-1][1] += call["function"]["arguments"]
        return made

    made = []
    for cut in (1, 2, 9, 30):
        with httpx.stream("POST", f"{served.openai_url}/chat/completions", json=body, timeout=HANG_S) as response:
            seen, last, stream_id = read(response.iter_lines(), until=cut)
        headers = {"Last-Event-ID": last}
        with httpx.stream(
            "GET", f"{served.openai_url}/streams/{stream_id}", headers=headers, timeout=HANG_S
        ) as response:
            rest, _, _ = read(response.iter_lines())
        made.append(calls(seen + rest))
        assert (seen + rest)[-1]["choices"][0]["finish_reason"] in ("tool_calls", "length")
    assert made[0] and all(each == made[0] for each in made)


def test_a_forced_call_wins_over_a_response_format(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = ask(client, tools=BOTH, tool_choice="required", response_format=format_, max_tokens=60)
    (choice,) = answer.choices
    assert choice.message.tool_calls
    assert choice.message.tool_calls[0].function.name in ("get_weather", "clock")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "foo"}}}],
             "tool_choice": "required"},
            "tools",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **fields)
    assert raised.value.response.json()["error"]["param"] == param
