"""The input and the tools of POST /v1/responses as agents send them: what becomes of each in the chat."""

import base64
import json
from typing import Any

import pytest

from api.generation.free_text import arguments_of, input_of
from api.openai.responses.body import ResponseRequest
from api.openai.responses.items import ItemWriter, sealed, unsealed
from api.openai.tools import served, unserved
from shared.errors import InvalidRequestError
from shared.text.languages.pieces import CallPart, ReplyPiece
from tests.unit.refusals import refusal

USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
E_ACUTE = base64.b64encode("é".encode()).decode()
PATCH = '*** Begin Patch\n+"é"\n*** End Patch'
CLOSE = {"type": "function", "name": "close_agent", "description": "Close it.", "strict": False, "parameters": {}}
AGENTS = {"type": "namespace", "name": "agents_v1", "description": "Sub-agents.", "tools": [CLOSE]}
APPLY = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start ")" |'},  # not regular
}
REGEX = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
CALL = {"type": "function_call", "call_id": "c"}
FILE = {"type": "input_file", "filename": "a.md"}
SEARCH = {"type": "web_search", "external_web_access": True}


def asked(**body: Any) -> ResponseRequest:
    return ResponseRequest.model_validate({"input": "hi", **body})


def messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return asked(input=[USER, *items]).messages()[1:]


def called(name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": text}


def test_tools_of_namespaces_and_custom_tools_are_functions_to_the_model() -> None:
    chat = asked(tools=[CLOSE, AGENTS, APPLY, SEARCH], tool_choice={"type": "custom", "name": "apply_patch"}).chat()
    close, agent, patch = (tool.function for tool in served(chat.tools))
    assert [tool.type for tool in unserved(chat.tools)] == [SEARCH["type"]]
    assert (close.name, close.description) == ("close_agent", "Close it.")
    assert (agent.name, agent.description) == ("agents_v1__close_agent", "Sub-agents.\n\nClose it.")
    assert patch.description == 'Edit files.\n\nIts input follows this lark grammar:\nstart: "(" start ")" |'
    assert patch.parameters is not None and patch.parameters["required"] == ["input"]
    assert chat.tool_choice is not None and chat.tool_choice.function.name == "apply_patch"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"name": "close_agent"}, "agents_v1__close_agent"),
        ({"name": "close_agent", "namespace": "agents_v1"}, "agents_v1__close_agent"),
        ({"name": "agents_v1__close_agent"}, "agents_v1__close_agent"),
    ],
)
def test_a_choice_names_a_tool_of_a_namespace_with_it_or_without(choice: dict[str, str], name: str) -> None:
    chat = asked(tools=[AGENTS], tool_choice={"type": "function", **choice}).chat()
    assert chat.tool_choice.function.name == name  # type: ignore[union-attr]


def test_a_choice_that_several_namespaces_have_is_refused() -> None:
    twice = asked(tools=[AGENTS, {**AGENTS, "name": "more"}], tool_choice={"type": "function", "name": "close_agent"})
    with pytest.raises(InvalidRequestError, match="several namespaces"):
        twice.chat()
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "apply_patch"}]}
    assert asked(tools=[AGENTS, APPLY], tool_choice=allowed).chat().tool_choice is not None


@pytest.mark.parametrize(
    ("item", "shown"),
    [
        (
            {**CALL, "namespace": "agents_v1", "name": "close", "arguments": '{"a": 1}'},
            called("agents_v1__close", {"a": 1}),
        ),
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": PATCH},
            called("apply_patch", {"input": PATCH}),
        ),
        ({"type": "custom_tool_call_output", "call_id": "c", "output": "Done"}, result("Done")),
        (
            {
                "type": "local_shell_call", "id": "lsh_1", "call_id": "c", "status": "completed",
                "action": {"type": "exec", "command": ["ls"], "env": {}},
            },
            called("local_shell", {"type": "exec", "command": ["ls"], "env": {}}),
        ),
        ({"type": "local_shell_call_output", "id": "c", "output": "a.txt"}, result("a.txt")),
        (
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "x", "outcome": {"type": "exit"}}]},
            result('[{"stdout": "x", "outcome": {"type": "exit"}}]'),
        ),
        (
            {
                "type": "agent_message", "author": "/root", "recipient": "/root/a",
                "content": [{"type": "input_text", "text": "Go."}, {"type": "encrypted_content"}],
            },
            {"role": "user", "content": "Message from /root to /root/a:\nGo."},
        ),
        (
            {"type": "compaction", "encrypted_content": sealed("We count.")},
            {"role": "user", "content": "Summary of the conversation so far:\n\nWe count."},
        ),
        (
            {
                "role": "user",
                "content": [{**FILE, "file_data": f"data:text/markdown;base64,{E_ACUTE}"}],
            },
            {"role": "user", "content": "a.md:\né"},
        ),
    ],
)  # fmt: skip
def test_an_item_is_shown_to_the_model(item: dict[str, Any], shown: dict[str, Any]) -> None:
    assert messages(item) == [shown]
    assert asked(input=[USER, item]).left_out(held=True) == []
    (kept,) = asked(input=[item]).input
    again = ResponseRequest.model_validate({"input": [USER, {"id": "stored", **kept.shown()}]})
    assert again.messages()[1:] == [shown], "as it is stored it says the same"


def test_a_call_of_an_mcp_server_is_shown_with_what_it_brought() -> None:
    call = {"type": "mcp_call", "id": "c", "server_label": "s", "name": "find", "arguments": '{"q": 1}'}
    assert messages({**call, "output": "7"}) == [called("find", {"q": 1}), result("7")]
    assert messages({**call, "error": "away"})[1] == result('Error: "away"')


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"tools": [APPLY]}, ["tools.format"]),
        ({"tools": [{**APPLY, "format": REGEX}]}, []),
        ({"tools": [{**CLOSE, "defer_loading": True}]}, ["tools.defer_loading"]),
        ({"input": [USER, {"type": "web_search_call", "action": {"query": "x"}}]}, ["input.web_search_call"]),
        ({"input": [USER, {"type": "compaction", "encrypted_content": "gAAA"}]}, ["input.compaction"]),
        (
            {"input": [USER, {"type": "agent_message", "author": "a", "recipient": "b", "content": []}]},
            ["input.agent_message"],
        ),
        (
            {"input": [USER, {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]},
            ["input.reasoning.encrypted_content"],
        ),
        ({"reasoning": {"summary": "detailed"}}, ["reasoning.summary"]),
        ({"service_tier": "flex"}, ["service_tier"]),
        ({"context_management": [{"type": "compaction", "compact_threshold": 1000}]}, ["context_management"]),
        (
            {
                "client_metadata": {"session_id": "s"}, "reasoning": {"summary": "auto"}, "service_tier": "auto",
                "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
                "tools": [{**CLOSE, "allowed_callers": ["direct"], "output_schema": {}}],
            },
            [],
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_taken_and_named(body: dict[str, Any], named: list[str]) -> None:
    given = asked(**body)
    assert given.left_out(held=True) == named
    assert given.messages()[-1] == {"role": "user", "content": "hi"}, "the rest is understood"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{**AGENTS, "tools": [SEARCH]}]}, "tools[0].tools[0].type"),
        ({"tools": [{**CLOSE, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
        ({"tools": [{**AGENTS, "tools": [CLOSE] * 300}, {**AGENTS, "tools": [CLOSE] * 300}]}, "tools"),
        ({"tools": [SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"input": [{"type": "compaction_trigger"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"id": "x" * 257}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}]},
            "input[0].content[0].file_data",
        ),
        (
            {
                "input": [{"role": "user", "content": [{**FILE, "file_data": "data:application/pdf;base64,JVBERi3/"}]}]
            },
            "input[0].content[0].file_data",
        ),
        ({"include": ["something.else"]}, "include[0]"),
        ({"input": []}, "input"),
    ],
)  # fmt: skip
def test_what_an_answer_would_be_wrong_without_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert refusal(ResponseRequest, {"input": "hi", **body}).param == param


def test_a_reference_that_nobody_has_looked_up_is_never_left_out_in_silence() -> None:
    with pytest.raises(InvalidRequestError, match="references"):
        messages({"type": "item_reference", "id": "msg_x_00"})


def test_images_that_calls_brought_stay_in_their_results() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "original"}
    calls = [{"type": "function_call", "call_id": each, "name": "view", "arguments": "{}"} for each in "ab"]
    brought = [
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "one"}, image]},
        {"type": "function_call_output", "call_id": "b", "output": "two"},
    ]
    shown = messages(*calls, *brought, {**USER, "role": "developer"})
    assert [message["role"] for message in shown] == ["assistant", "tool", "tool", "developer"]
    seen = {"type": "image_url", "image_url": {"url": image["image_url"], "detail": "high"}}
    assert shown[1]["content"] == [{"type": "text", "text": "one"}, seen], (
        "a template gets them behind (test_fitting.py)"
    )


def test_what_another_server_has_encrypted_is_no_text_of_ours() -> None:
    assert unsealed(sealed("so, é \ud800")) == "so, é ?"
    for foreign in (None, "", "gAAAAABo", "parallm:?", "parallm:/w=="):
        assert unsealed(foreign) == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (arguments_of(PATCH), PATCH),
        ('{"input": ""}', ""),
        ('{"input": "*** Beg', "*** Beg"),
        ('{"inp', ""),
        ("", ""),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("not JSON", "not JSON"),
    ],
)
def test_the_text_of_a_custom_tool_is_read_from_its_arguments(arguments: str, text: str) -> None:
    assert input_of(arguments) == text


def test_a_custom_call_that_comes_piece_by_piece_is_told_of_when_it_is_whole() -> None:
    writer = ItemWriter("n", "c", asked(tools=[AGENTS, APPLY]).tools or ())
    whole = arguments_of(PATCH)
    events = writer.take(ReplyPiece(calls=[CallPart(0, name="apply_patch", arguments=whole[:7])]))
    events += writer.take(ReplyPiece(calls=[CallPart(0, arguments=whole[7:], complete=True)]))
    events += writer.take(ReplyPiece(calls=[CallPart(1, name="agents_v1__close_agent", arguments="{}", complete=True)]))
    kinds = ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"]
    assert [event["type"].removeprefix("response.") for event in events[:4]] == kinds
    assert events[1]["delta"] == events[2]["input"] == PATCH
    patch, close = writer.items
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert (close["type"], close["namespace"], close["name"]) == ("function_call", "agents_v1", "close_agent")
    assert patch["call_id"] != close["call_id"]


def test_an_output_or_an_answer_without_content_is_an_empty_one() -> None:
    output = {"type": "function_call_output", "call_id": "c", "output": None}
    shown = messages({**CALL, "name": "f", "arguments": "{}"}, output, {"role": "assistant", "content": None})
    assert [each["content"] for each in shown] == ["", "", ""]
