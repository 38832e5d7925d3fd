"""/v1/responses as agents use it (Codex, the AI SDK, openai-agents): their tools and items, and what is not done."""

import json
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from api.http.api_keys import line_of
from api.openai.chat import UNUSED_HEADER
from api.openai.responses.items import sealed, unsealed
from shared.sequences import SequenceSpec
from shared.text.codec import TokenizerBundle
from tests.redis import scripted_worker
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer, ScriptedWorker, working
from tests.unit.api_texts import bundle, codec
from tests.waiting import wait_until

TEMPLATE = """{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>
{%- endif %}{{ m.content }}
{% endfor %}"""
PATH = "/v1/responses"


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ANSWERS = {
    "close": Answer("<think>I must</think>I close it.\n" + tool_call("agents_v1__close_agent", {"target": "a"})),
    "patch": Answer(tool_call("apply_patch", {"input": "*** Begin Patch\n*** End Patch"})),
    "list": Answer(tool_call("exec_command", {"cmd": "ls"})),
    "alone.": Answer("We closed the agent."),  # the end of what a compaction asks
}


def script(spec: SequenceSpec) -> Answer:
    """By the last word of the prompt."""
    asked = codec().decode(spec.prompt_ids)
    return Answer("<think>hm") if "only think" in asked else ANSWERS.get(asked.split()[-1], Answer("done"))


@pytest.fixture
async def worker(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedWorker]:
    plain = bundle()
    shown = TokenizerBundle(plain.tokenizer_json, TEMPLATE, plain.eos_token_ids, plain.special_tokens)
    roomy = msgspec.structs.replace(scripted_worker.CARD, context_length=16384, tokenizer_sha256=shown.sha256)
    monkeypatch.setattr(scripted_worker, "bundle", lambda: shown)
    monkeypatch.setattr(scripted_worker, "CARD", roomy)
    async with working(redis_url, script) as playing:
        yield playing


@pytest.fixture
async def client(server: Api) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def prompt(worker: ScriptedWorker) -> str:
    return codec().decode(worker.specs[-1].prompt_ids)


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


EXEC = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command in a PTY.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}
CLOSE = {
    "type": "function",
    "name": "close_agent",
    "description": "Close an agent.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"target": {"type": "string"}}},
}
AGENTS = {"type": "namespace", "name": "agents_v1", "description": "Tools for sub-agents.", "tools": [CLOSE]}
PATCH_GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line*
delete_hunk: "*** Delete File: " filename LF

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

%import common.LF
"""
APPLY = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Use the `apply_patch` tool to edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
}
# What Codex CLI 0.171 sends with each request, shortened.
CODEX: dict[str, Any] = {
    "model": MODEL,
    "tools": [EXEC, AGENTS, APPLY, {"type": "web_search", "external_web_access": True}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a227bb",
    "client_metadata": {"session_id": "01a227bb", "x-codex-turn-metadata": "{}"},
}
OPENING = [
    said("developer", "You are a coding agent."),
    said("developer", "<skills_instructions>"),
    said("user", "<environment_context>"),
]


@cache
def known_events() -> TypeAdapter[list[ResponseStreamEvent]]:
    return TypeAdapter(list[ResponseStreamEvent])


async def codex(server: Api, *turns: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of one request; its events are what the openai package knows."""
    async with server.stream(PATH, {**CODEX, "input": [*OPENING, *turns]}) as events:
        assert set(events.response.headers[UNUSED_HEADER].split(", ")) == {"tools.web_search"}
        seen = await events.all()
    known_events().validate_python(seen)
    assert seen[-1]["type"] == "response.completed"
    items = [event["item"] for event in seen if event["type"] == "response.output_item.done"]
    assert items == seen[-1]["response"]["output"]
    assert [tool["type"] for tool in seen[-1]["response"]["tools"]] == ["function", "namespace", "custom"]
    return items


async def test_codex_calls_a_tool_of_a_namespace_and_goes_on(server: Api, worker: ScriptedWorker) -> None:
    thought, message, call = await codex(server, said("user", "close"))
    assert "Tools for sub-agents.\\n\\nClose an agent." in prompt(worker)
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "agents_v1", "close_agent")
    assert json.loads(call["arguments"]) == {"target": "a"}
    output = {"type": "function_call_output", "id": "fco_1", "call_id": call["call_id"], "output": "closed"}
    without_text = {name: value for name, value in thought.items() if name != "content"}  # as it sends reasoning back
    (end,) = await codex(server, said("user", "close"), without_text, message, call, output)
    assert end["content"][0]["text"] == "done"
    earlier = (
        '<think>I must</think>I close it.\n<tool_call>\n{"name": "agents_v1__close_agent", "arguments": {"target":'
    )
    assert earlier in prompt(worker), "with its thought, so that the KV of it is found"


async def test_codex_edits_files_by_a_tool_that_takes_any_text(server: Api, worker: ScriptedWorker) -> None:
    (call,) = await codex(server, said("user", "patch"))
    assert worker.specs[-1].sampling.grammar, "the call's text follows the grammar of the tool"
    assert (call["type"], call["name"]) == ("custom_tool_call", "apply_patch")
    assert call["input"] == "*** Begin Patch\n*** End Patch"
    assert "Its input follows this lark grammar:\\nstart: begin_patch hunk+ end_patch" in prompt(worker)
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Success."}
    await codex(server, said("user", "patch"), call, output)
    assert '"arguments": {"input": "*** Begin Patch\\n*** End Patch"}' in prompt(worker)
    assert prompt(worker).endswith("user: <tool_response>\nSuccess.\n</tool_response>\n")


GRAMMAR = {"syntax": "regex", "definition": r"\*\*\* Begin Patch\n[^\r]*"}
CHAT_TOOLS: list[dict[str, Any]] = [
    {"type": "custom", "custom": {"name": "apply_patch", "format": {"type": "grammar", "grammar": GRAMMAR}}},
    {"type": "function", "function": {"name": "exec_command", "parameters": EXEC["parameters"]}},
]


async def test_a_chat_calls_a_tool_that_takes_any_text(server: Api, worker: ScriptedWorker) -> None:
    asked = {"messages": [{"role": "user", "content": "patch"}], "tools": CHAT_TOOLS}
    answer = await server.post("/v1/chat/completions", asked)
    message = ChatCompletion.model_validate(answer.json()).choices[0].message
    (call,) = message.tool_calls or []
    assert call.type == "custom" and answer.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert (call.custom.name, call.custom.input) == ("apply_patch", "*** Begin Patch\n*** End Patch")
    assert worker.specs[-1].sampling.grammar, "the text follows its form"
    assert "Its input follows this regex grammar" in prompt(worker) and UNUSED_HEADER not in answer.headers
    async with server.stream("/v1/chat/completions", asked) as events:
        deltas = [event["choices"][0]["delta"] for event in await events.all()]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert [part["custom"] for part in parts] == [
        {"name": "apply_patch", "input": ""},
        {"input": "*** Begin Patch\n*** End Patch"},
    ]
    turns = [*asked["messages"], message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "Success."}]
    assert (await server.post("/v1/chat/completions", {**asked, "messages": turns})).status_code == 200
    assert '"arguments": {"input": "*** Begin Patch\\n*** End Patch"}' in prompt(worker)
    function = {**asked, "messages": [{"role": "user", "content": "list"}]}
    (listed,) = (await server.post("/v1/chat/completions", function)).json()["choices"][0]["message"]["tool_calls"]
    assert listed["function"] == {"name": "exec_command", "arguments": '{"cmd": "ls"}'}


async def test_a_chat_may_have_to_call_a_tool_that_takes_any_text(server: Api, worker: ScriptedWorker) -> None:
    choice = {"type": "custom", "custom": {"name": "apply_patch"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [choice]}}
    for wanted in (choice, allowed):
        body = {"messages": [{"role": "user", "content": "patch"}], "tools": CHAT_TOOLS, "tool_choice": wanted}
        answer = await server.post("/v1/chat/completions", body)
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert call["custom"]["input"] == "*** Begin Patch\n*** End Patch"
        assert "exec_command" not in worker.specs[-1].sampling.grammar
    missing = {**body, "tool_choice": {"type": "custom", "custom": {"name": "other"}}}
    refused = await server.post("/v1/chat/completions", missing)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


HOSTED, NAMED = {"type": "web_search", "name": "search"}, {"type": "function", "function": {"name": "list_files"}}
SAID = {"messages": [{"role": "user", "content": "list"}]}
BROUGHT = {"role": "tool", "tool_call_id": "c", "content": "text"}
PROTOCOLS: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[Any]]] = {  # path, body, an own tool, choices
    "chats": (
        "/v1/chat/completions", SAID, NAMED,
        [
            "required", {"type": "function", "function": {"name": "search"}}, {"type": "web_search"},
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [HOSTED]}},
        ],
    ),
    "responses": (
        "/v1/responses", {"input": "list"}, {"type": "function", "name": "list_files"},
        [
            "required", {"type": "function", "name": "search"}, {"type": "web_search"},
            {"type": "allowed_tools", "mode": "required", "tools": [HOSTED]},
        ],
    ),
    "messages": (
        "/v1/messages", {**SAID, "max_tokens": 99}, {"name": "list_files", "input_schema": {"type": "object"}},
        [{"type": "any"}, {"type": "tool", "name": "search"}],
    ),
    "ollama": ("/api/chat", {**SAID, "model": MODEL, "stream": False}, NAMED, []),
}  # fmt: skip

COUNTS = {"responses": "/input_tokens", "messages": "/count_tokens"}  # routes that count, behind the path


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_tool_of_a_type_that_is_not_served_is_named_and_a_choice_of_it_refused(
    server: Api, worker: ScriptedWorker, protocol: str
) -> None:
    path, body, own, choices = PROTOCOLS[protocol]
    kinds = ("web_search", "shell", "local_shell", "mcp", "image_generation", "tool_search", "anything")
    for tools in ([HOSTED], [own, HOSTED], [own, *({**HOSTED, "type": kind} for kind in kinds)]):
        answer = await server.post(path, {**body, "tools": tools})
        assert answer.status_code == 200
        named = answer.headers["x-parallm-unused-parameters"].split(", ")
        assert {f"tools.{tool['type']}" for tool in tools if tool is not own} <= set(named)
        assert "search" not in prompt(worker)
        if protocol == "chats":
            counted = await server.post("/tokenize", {**body, "tools": tools})
            assert counted.headers[UNUSED_HEADER] == answer.headers[UNUSED_HEADER]
            assert counted.json()["tokens"] == list(worker.specs[-1].prompt_ids)
        if count := COUNTS.get(protocol):
            uncounted = {"max_tokens"} if protocol == "messages" else set()
            asked = {"model": MODEL, **{name: body[name] for name in body.keys() - uncounted}, "tools": tools}
            counted = await server.post(path + count, asked)
            assert counted.headers[UNUSED_HEADER] == answer.headers[UNUSED_HEADER]
            assert counted.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]
    for choice in choices:
        refused = await server.post(path, {**body, "tools": [HOSTED], "tool_choice": choice})
        assert refused.status_code == 400
        assert "tool_choice" in refused.text and "web_search" in refused.text
    if choices:  # one that the model can meet
        forced = await server.post(path, {**body, "tools": [own, HOSTED], "tool_choice": choices[0]})
        assert forced.status_code == 200 and "list_files" in worker.specs[-1].sampling.grammar


async def test_an_image_that_a_tool_brings_to_a_model_that_sees_none_is_named(
    server: Api, worker: ScriptedWorker
) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0K", "detail": "original"}
    call = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}
    turns = [said("user", "look"), call, {"type": "function_call_output", "call_id": "c", "output": [image]}]
    answer = await server.post(PATH, {"model": MODEL, "input": turns})
    assert answer.status_code == 200 and answer.headers[UNUSED_HEADER] == "input.input_image"
    assert "[an image, which you cannot see]" in prompt(worker)
    kept = (await server.http.get(f"{PATH}/{answer.json()['id']}/input_items?order=asc")).json()["data"]
    assert kept[2]["output"][0]["image_url"] == image["image_url"], "it is stored as it came"
    refused = await server.post(PATH, {"model": MODEL, "input": [{"role": "user", "content": [image]}]})
    assert refused.status_code == 400, "what the user shows is asked about"


async def test_an_image_in_a_tool_s_result_is_named_in_messages_too(server: Api, worker: ScriptedWorker) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0K"}}
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "Read", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [image]}]},
    ]
    body = {"model": MODEL, "max_tokens": 8, "messages": turns}
    answer = await server.post("/v1/messages", body)
    assert answer.status_code == 200 and answer.headers[UNUSED_HEADER] == "messages.tool_result.image"
    assert "[an image, which you cannot see]" in prompt(worker)
    counted = await server.post("/v1/messages/count_tokens", {"model": MODEL, "messages": turns})
    assert counted.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]
    refused = await server.post("/v1/messages", {**body, "messages": [{"role": "user", "content": [image]}]})
    assert refused.status_code == 400, "what the user shows is asked about"


async def test_an_image_in_a_tool_s_result_is_named_in_chats_too(server: Api, worker: ScriptedWorker) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0K"}}
    result = {**BROUGHT, "content": [{"type": "text", "text": "a.png:"}, image]}
    turns = [*SAID["messages"], calling(), result]
    answer = await server.post("/v1/chat/completions", {"messages": turns})
    assert answer.status_code == 200 and answer.headers[UNUSED_HEADER] == "messages.tool.image"
    assert "a.png:\n[an image, which you cannot see]" in prompt(worker)


def calling(arguments: str = "{}") -> dict[str, Any]:
    """A turn that calls a function."""
    call = {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


STOPPED: dict[str, list[dict[str, Any]]] = {  # what agents send back of an answer that was stopped, and of odd tools
    "before its first word": [{"role": "assistant", "content": None, "tool_calls": None}],
    "without a word": [{"role": "assistant"}],
    "in the middle of a call": [calling("{")],
    "before the call's result": [calling()],
    "a tool without a result": [calling(), {**BROUGHT, "content": None}],
    "a result without a call": [BROUGHT],
    "two results": [calling(), BROUGHT, BROUGHT],
    "arguments in arguments": [calling("[" * 9999)],
}  # fmt: skip


@pytest.mark.parametrize("turns", STOPPED.values(), ids=STOPPED)
async def test_a_session_goes_on_after_an_answer_that_was_stopped(
    server: Api, worker: ScriptedWorker, turns: list[dict[str, Any]]
) -> None:
    user = {"role": "user", "content": "go on"}
    answer = await server.post("/v1/chat/completions", {"messages": [*SAID["messages"], *turns, user]})
    assert answer.status_code == 200, answer.text
    assert "go on" in prompt(worker)


async def test_references_stand_for_items_that_are_stored(client: AsyncOpenAI, worker: ScriptedWorker) -> None:
    """The AI SDK's second step of a tool loop."""
    tools: list[Any] = [EXEC, AGENTS]
    for name in ("", "my_name-1"):
        first = await client.responses.create(
            model=MODEL, input="close", tools=tools, extra_body={"request_id": name} if name else None
        )
        call = first.output[-1]
        assert call.type == "function_call" and call.id is not None and first.output[0].id is not None
        references: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output]
        references[0] = {"id": first.output[0].id}  # the type may be left out
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "closed"}
        second = await client.responses.create(
            model=MODEL, input=[said("user", "close"), *references, output], tools=tools  # type: ignore[list-item]
        )  # fmt: skip
        assert '<think>I must</think>I close it.\n<tool_call>\n{"name": "agents_v1__close_agent"' in prompt(worker)
        third: list[Any] = [{"type": "item_reference", "id": second.output[0].id}, said("user", "more")]
        await client.responses.create(model=MODEL, input=third, previous_response_id=first.id)
        assert prompt(worker).endswith("assistant: done\nuser: more\n")
        items = [item async for item in client.responses.input_items.list(second.id, order="asc")]
        assert [item.type for item in items][1:] == [item.type for item in first.output] + ["function_call_output"]
        talk = await client.conversations.create(items=references)
        assert len((await client.conversations.items.list(talk.id)).data) == 3


async def test_a_reference_to_what_is_not_stored_is_not_found(
    redis_url: str, worker: ScriptedWorker, tmp_path: Path
) -> None:
    (file := tmp_path / "keys").write_text(
        "\n".join(line_of(f"{who}-key-of-these", name=who, tenant=who) for who in ("first", "second"))
    )
    async with api(redis_url, api_key_file=file) as server:

        async def ask(who: str, *turns: dict[str, Any], **fields: Any) -> Any:
            headers = {"authorization": f"Bearer {who}-key-of-these"}
            return await server.post(PATH, {"model": MODEL, "input": list(turns), **fields}, headers=headers)

        stored = (await ask("first", said("user", "hi"))).json()["output"][0]["id"]
        unstored = (await ask("first", said("user", "hi"), store=False)).json()["output"][0]["id"]
        assert (await ask("first", {"type": "item_reference", "id": stored}, said("user", "so"))).status_code == 200
        foreign = [("first", unstored), ("second", stored), ("first", f"{stored}9"), ("first", "x"), ("first", "a_b_c")]
        for who, name in foreign:
            refused = await ask(who, said("user", "hi"), {"type": "item_reference", "id": name})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (404, "input[1]") and name in error["message"]
        many = [{"type": "item_reference", "id": f"msg_{at}_00"} for at in range(1025)]
        assert (await ask("first", *many)).json()["error"]["param"] == "input"


async def test_reasoning_comes_back_sealed_where_it_is_asked_for(server: Api, worker: ScriptedWorker) -> None:
    body = {"model": MODEL, "input": "close", "tools": [AGENTS], "store": False}
    assert "encrypted_content" not in (await server.post(PATH, body)).json()["output"][0]
    answer = await server.post(PATH, {**body, "include": ["reasoning.encrypted_content"]})
    assert unsealed(answer.json()["output"][0]["encrypted_content"]) == "I must"
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA", "content": None}
    turns = [said("user", "hi"), foreign, {"role": "assistant", "content": "ho"}, said("user", "so")]
    answer = await server.post(PATH, {"model": MODEL, "input": turns})
    assert answer.headers[UNUSED_HEADER] == "input.reasoning.encrypted_content"
    kept = (await server.http.get(f"{PATH}/{answer.json()['id']}/input_items?order=asc")).json()["data"]
    assert kept[1]["encrypted_content"] == "gAAAAA", "for whoever can read it"


async def test_a_tier_that_is_asked_for_is_answered_with_the_one_that_there_is(server: Api) -> None:
    answer = await server.post(PATH, {"model": MODEL, "input": "hi", "service_tier": "flex"})
    assert answer.json()["service_tier"] == "default" and answer.headers[UNUSED_HEADER] == "service_tier"
    assert "service_tier" not in (await server.post(PATH, {"model": MODEL, "input": "hi"})).json()


async def test_a_background_response_has_its_tools_whoever_goes_on_with_it(
    client: AsyncOpenAI, worker: ScriptedWorker
) -> None:
    tools: Any = CODEX["tools"]
    made = await client.responses.create(model=MODEL, input="patch", tools=tools, background=True)

    async def ended() -> bool:
        return (await client.responses.retrieve(made.id)).status == "completed"

    await wait_until(ended)
    (call,) = (await client.responses.retrieve(made.id)).output
    assert call.type == "custom_tool_call" and call.input.startswith("*** Begin")
    output: list[Any] = [{"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Success."}]
    await client.responses.create(model=MODEL, input=output, previous_response_id=made.id, tools=tools)
    assert '"arguments": {"input": "*** Begin Patch' in prompt(worker)
    await client.responses.create(model=MODEL, previous_response_id=made.id)
    assert prompt(worker).startswith("user: patch\nassistant: <tool_call>"), "what was said before may be all"


async def test_tokens_are_counted_as_a_response_reads_them(client: AsyncOpenAI, worker: ScriptedWorker) -> None:
    first = await client.responses.create(model=MODEL, input="hi")
    body: dict[str, Any] = {"model": MODEL, "input": "list", "tools": [EXEC], "instructions": "be kind"}
    for more in ({}, {"previous_response_id": first.id}):
        read = await client.responses.create(**body, **more)
        asked = len(worker.specs)
        counted = await client.responses.input_tokens.count(**body, **more)
        assert read.usage is not None and counted.input_tokens == read.usage.input_tokens
        assert len(worker.specs) == asked, "counting generates nothing"
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_tokens.count(model=MODEL, input="hi", previous_response_id="resp_none")


async def test_a_conversation_is_compacted_and_gone_on_with(client: AsyncOpenAI, worker: ScriptedWorker) -> None:
    first = await client.responses.create(model=MODEL, input="close", tools=[AGENTS])  # type: ignore[list-item]
    call = first.output[-1]
    assert call.type == "function_call"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "closed"}
    compacted = await client.responses.compact(
        model=MODEL, previous_response_id=first.id, input=[output], instructions="be kind"
    )
    asked = prompt(worker)
    assert asked.startswith("system: be kind\nuser: close\nassistant: <think>I must</think>I close it.")
    assert "closed" in asked and "Write a summary" in asked
    assert compacted.object == "response.compaction" and compacted.usage.input_tokens == len(asked)
    user, summary = compacted.output
    assert (user.type, user.role, summary.type) == ("message", "user", "compaction")
    assert unsealed(summary.encrypted_content) == "We closed the agent."
    going_on: list[Any] = [*(item.to_dict(warnings=False) for item in compacted.output), said("user", "and now?")]
    second = await client.responses.create(model=MODEL, input=going_on)
    about = "user: Summary of the conversation so far:\n\nWe closed the agent.\n"
    assert prompt(worker) == f"user: close\n{about}user: and now?\n"
    await client.responses.create(model=MODEL, input="more", previous_response_id=second.id)
    assert about in prompt(worker), "it is stored as it came"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(compacted.id)


async def test_a_compaction_that_cannot_be_is_refused(server: Api, worker: ScriptedWorker) -> None:
    for name, value in (("stream", True), ("background", True), ("conversation", "conv_1")):
        refused = await server.post(f"{PATH}/compact", {"model": MODEL, "input": "hi", name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    refused = await server.post(f"{PATH}/compact", {"model": MODEL, "input": "only think"})
    assert refused.json()["error"]["param"] == "max_output_tokens", "a summary that says nothing would lose all"


async def test_paths_and_methods_that_are_not_there_say_what_is(server: Api) -> None:
    answer = await server.http.get(PATH)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    answer = await server.http.put(f"{PATH}/resp_1")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET")
    assert "takes DELETE and GET" in answer.json()["error"]["message"]


async def test_what_is_sealed_counts_as_what_it_says(server: Api, worker: ScriptedWorker) -> None:
    turns = [{"type": "compaction", "encrypted_content": sealed("x" * 20_000)}, said("user", "hi")]
    refused = (await server.post(PATH, {"model": MODEL, "input": turns})).json()["error"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "input")


async def test_codex_reads_models_in_its_own_shape(server: Api) -> None:
    listed = (await server.http.get("/v1/models", params={"client_version": "0.171.0"})).json()
    (model,) = listed["models"]
    assert model["slug"] == MODEL == listed["data"][0]["id"]
    assert model["context_window"] == listed["data"][0]["context_length"]
    assert model["apply_patch_tool_type"] == "freeform" and model["input_modalities"] == ["text"]
    assert "models" not in (await server.http.get("/v1/models")).json()
