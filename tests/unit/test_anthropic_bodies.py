"""What a message request comes to as a chat, and what of it is refused by name."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from api.anthropic.blocks import BlockWriter
from api.anthropic.body import CountRequest, MessagesRequest
from api.anthropic.turns import ChatWriter, places_of_images, without_telemetry
from api.http.anthropic_errors import anthropic_error
from api.http.errors import from_validation
from api.openai.tools import served, unserved
from shared.errors import ContextLengthExceededError, InvalidRequestError
from shared.text.languages.pieces import CallPart, ReplyPiece

HELLO = [{"role": "user", "content": "hi"}]
USE = {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {"zone": "UTC"}}
THINKS = "{{ enable_thinking }}<think></think>"


def request(**fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"max_tokens": 9, "messages": HELLO, **fields})


def chat(messages: list[dict[str, Any]], system: Any = None) -> list[dict[str, Any]]:
    body = request(messages=messages, system=system)
    writer = ChatWriter({"clock": {"name": "clock"}})
    writer.begin(body.system or [])
    for turn in body.messages:
        writer.add(turn)
    return writer.chat


def text(*texts: str, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each, **more} for each in texts]


def test_turns_become_messages() -> None:
    assert chat(
        [
            {"role": "user", "content": text("What", "time?", cache_control={"type": "ephemeral"})},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "A clock.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    *text("I look"),
                    USE,
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": text("noon", "sharp")},
                    {"type": "tool_result", "tool_use_id": "toolu_2", "content": "broken", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "toolu_3"},
                    *text("and now?"),
                ],
            },
            {"role": "system", "content": "Be brief."},
        ],
        system=text("You are", "a clock."),
    ) == [
        {"role": "system", "content": "You are\na clock."},
        {"role": "user", "content": "What\ntime?"},
        {
            "role": "assistant",
            "content": "I look",
            "reasoning_content": "A clock.",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "noon\nsharp"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: broken"},
        {"role": "tool", "tool_call_id": "toolu_3", "content": ""},
        {"role": "user", "content": "and now?"},
        {"role": "system", "content": "Be brief."},
    ]


def test_turns_of_one_role_that_follow_each_other_are_one() -> None:
    said = [{"role": role, "content": word} for role, word in (("user", "a"), ("user", "b"))]
    answered = [{"role": "assistant", "content": word} for word in ("c", "d")]
    assert chat([*said, *answered, *said]) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": "a\nb"},
    ]


@pytest.mark.parametrize(
    ("told", "left"),
    [
        ("x-anthropic-billing-header: cc_version=2.1.37; cch=fa690;", ""),
        ("x-anthropic-billing-header: cch=1;\nYou are", "You are"),
        ("\nx-anthropic-a: 1\n\nx-anthropic-b: 2\nYou are\nx-anthropic-c: 3", "You are\nx-anthropic-c: 3"),
        ("You are x-anthropic-billing-header: 1", "You are x-anthropic-billing-header: 1"),
        ("  You are", "  You are"),
    ],
)
def test_lines_for_anthropic_s_servers_are_no_part_of_the_prompt(told: str, left: str) -> None:
    assert without_telemetry(told) == left
    assert chat(HELLO, system=text(told, "a clock"))[0]["content"] == (f"{left}\na clock" if left else "a clock")


def test_a_last_turn_of_the_assistant_is_gone_on_with() -> None:
    body = request(messages=[*HELLO, {"role": "assistant", "content": text("I ", "say ")}]).chat("")
    assert body.continue_final_message and body.messages[-1].content == "I say "
    assert not request().chat("").continue_final_message
    for nothing in ([USE], [*text("a"), USE], [], text("")):
        with pytest.raises(ValidationError, match="goes on with it"):
            request(messages=[*HELLO, {"role": "assistant", "content": nothing}])


def test_tools_and_their_choice_become_those_of_a_chat() -> None:
    clock = {"name": "c" * 128, "description": "d", "input_schema": {"type": "object"}, "strict": True, "x": 1}
    body = request(tools=[clock, {"type": "custom", "name": "other", "input_schema": {}}], tool_choice={"type": "any"})
    made = body.chat("")
    assert made.tools is not None
    assert [each.function.model_dump() for each in made.tools] == [
        {"name": "c" * 128, "description": "d", "parameters": {"type": "object"}, "strict": True},
        {"name": "other", "description": None, "parameters": {}, "strict": None},
    ]
    assert (made.tool_choice, made.parallel_tool_calls) == ("required", True)
    one = request(tools=[clock], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).chat("")
    assert (one.tool_choice, one.parallel_tool_calls) == ("auto", False)
    assert request(tools=[clock], tool_choice={"type": "none"}).chat("").tool_choice == "none"
    named = request(tools=[clock], tool_choice={"type": "tool", "name": "c" * 128}).chat("").tool_choice
    assert not isinstance(named, str | None) and named.model_dump()["function"] == {"name": "c" * 128}


def test_what_all_endpoints_share_goes_through() -> None:
    body = request(
        temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["x"], seed=4, metadata={"user_id": "me"}, user="session",
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    ).chat("")  # fmt: skip
    assert (body.temperature, body.top_p, body.top_k, body.stop, body.seed) == (0.5, 0.9, 3, ("x",), 4)
    assert (body.max_tokens, body.reasoning_effort, body.user, body.metadata) == (9, "low", "session", None)
    assert body.response_format is not None and body.response_format.json_schema is not None
    older = request(output_format={"type": "json_schema", "schema": {"type": "object"}}).chat("")
    assert older.response_format == body.response_format


@pytest.mark.parametrize(
    ("thinking", "variables", "unused"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, {"enable_thinking": True}, ["thinking.budget_tokens"]),
        ({"type": "adaptive", "display": "omitted"}, {"enable_thinking": True}, []),
        ({"type": "disabled"}, {"enable_thinking": False}, []),
        (None, {"enable_thinking": False}, []),
    ],
)
def test_thinking_is_the_template_s_switch(thinking: Any, variables: Any, unused: list[str]) -> None:
    body = request(thinking=thinking)
    made = body.chat(THINKS)
    shown = {name: value for name, value in (made.chat_template_kwargs or {}).items() if name == "enable_thinking"}
    assert (shown, made.include_reasoning) == (variables, variables["enable_thinking"])
    assert body.unused(THINKS, bounded=False) == unused
    assert body.unused(THINKS, bounded=True) == []
    assert ("thinking" in body.unused("<think></think>", bounded=True)) == (thinking is not None), (
        "a template without the switch"
    )
    assert request(thinking={"type": "disabled"}).unused("no such marks", bounded=False) == []
    budget = request(thinking={"type": "enabled", "budget_tokens": 7}).chat(THINKS + "{{ thinking_budget }}")
    assert (budget.chat_template_kwargs or {})["thinking_budget"] == budget.max_reasoning_tokens == 7


def test_a_deferred_tool_is_told_of_where_a_search_has_found_it() -> None:
    found = [{"type": "tool_reference", "tool_name": "later"}, *text("That is it.")]
    search = {**USE, "name": "search"}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [search]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": found}]},
    ]
    tools = [{"name": "search", "input_schema": {}}, {"name": "later", "input_schema": {}, "defer_loading": True}]
    made = request(messages=turns, tools=tools).chat("")
    assert [tool.function.name for tool in made.tools or ()] == ["search"]
    shown, said = str(made.messages[-1].content).split("\n</tools>\n")
    assert json.loads(shown.removeprefix("<tools>\n"))["function"]["name"] == "later" and said == "That is it."
    named = request(tools=tools, tool_choice={"type": "tool", "name": "later"}).chat("").tools
    assert [tool.function.name for tool in named or ()] == ["search", "later"]
    with pytest.raises(InvalidRequestError, match="no tool is named 'later'"):
        request(messages=turns, tools=tools[:1]).chat("")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
DOCUMENT = {"type": "document", "source": IMAGE["source"]}
RESULT = {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "sound"}]}
TOOL = {"name": "f", "input_schema": {}}
MEDIA, URL = "messages[0].content[0].source.media_type", "messages[0].content[0].source.url"


def no_image(**fields: Any) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x", **fields}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"topp": 1}, "topp"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [DOCUMENT]}]}, "messages[0].content[0].source"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [DOCUMENT]}]}, "messages[1].content[0]"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [IMAGE]}]}, "messages[1].content[0]"),
        ({"messages": [{"role": "user", "content": [no_image(type="text")]}]}, "messages[0].content[0].source.type"),
        ({"messages": [{"role": "user", "content": [no_image(data=None)]}]}, "messages[0].content[0].source.data"),
        ({"messages": [{"role": "user", "content": [no_image(media_type="image/tiff")]}]}, MEDIA),
        ({"messages": [{"role": "user", "content": [no_image(type="url", url="http://x/a")]}]}, URL),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20260120"]}]}, "tools[0].allowed_callers"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"output_config": {"task_budget": {"total": 1}}}, "output_config.task_budget"),
        ({"container": "c"}, "container"),
        ({"speed": "fast"}, "speed"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"stop": "x"}, "stop"),
        ({"top_k": 2**64}, "top_k"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as refused:
        request(**fields)
    error = from_validation(refused.value.errors())
    assert error.param == named and named in error.message


def test_what_asks_for_nothing_is_taken() -> None:
    request(
        service_tier="auto", speed="standard", container=None, mcp_servers=[], diagnostics=None, inference_geo=None,
        cache_control={"type": "ephemeral", "ttl": "1h"}, metadata={"user_id": None},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        tools=[{**TOOL, "type": None, "defer_loading": False, "eager_input_streaming": True, "input_examples": [{}]}],
    )  # fmt: skip
    count = {"model": "m", "messages": HELLO, "tools": [TOOL], "thinking": {"type": "disabled"}, "system": "s"}
    assert CountRequest.model_validate(count).chat("").tools


PIECES = [
    ReplyPiece(reasoning="so "),
    ReplyPiece(reasoning="so"),
    ReplyPiece(content="I look"),
    ReplyPiece(content="."),
    ReplyPiece(calls=[CallPart(0, "clock", '{"zo')]),
    ReplyPiece(calls=[CallPart(0, "", 'ne": "UTC"}', complete=True), CallPart(1, "other", "{}", complete=True)]),
    ReplyPiece(calls=[CallPart(2, "cut", '{"a": [1, "b')]),
]


def test_events_add_up_to_the_blocks() -> None:
    writer, whole = BlockWriter("b", shows_thinking=True), BlockWriter("b", shows_thinking=True)
    events = [event for piece in PIECES for event in writer.take(piece)] + writer.end()
    together = ReplyPiece()
    for piece in PIECES:
        together.add(piece)
    whole.take(together)
    whole.end()
    assert writer.blocks == whole.blocks
    assert [block["type"] for block in whole.blocks] == ["thinking", "text", "tool_use", "tool_use", "tool_use"]
    assert [block["input"] for block in whole.blocks[2:]] == [{"zone": "UTC"}, {}, {"a": [1]}]
    assert len({block["id"] for block in whole.blocks[2:]}) == 3
    built: list[dict[str, Any]] = []
    for event in events:
        assert event["index"] == len(built) - (event["type"] != "content_block_start"), "one block is open at a time"
        if event["type"] == "content_block_start":
            built.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = {name: value for name, value in event["delta"].items() if name != "type"}
            ((name, value),) = delta.items()
            name = "json" if name == "partial_json" else name
            built[-1][name] += value
    for block, expected in zip(built, whole.blocks, strict=True):
        arguments = block.pop("json")
        if expected["type"] == "tool_use" and expected["name"] != "cut":
            block["input"] = json.loads(arguments)
        elif expected["type"] == "tool_use":
            assert arguments == '{"a": [1, "b'
            continue
        assert block == expected


def test_omitted_thinking_leaves_a_block_without_its_text() -> None:
    writer = BlockWriter("b", shows_thinking=False)
    events = [*writer.take(PIECES[0]), *writer.take(PIECES[2]), *writer.end()]
    assert writer.blocks[0]["thinking"] == "" and writer.blocks[0]["signature"]
    assert [event["delta"]["type"] for event in events if "delta" in event] == ["signature_delta", "text_delta"]


def test_images_stand_where_they_were_and_those_of_results_with_them() -> None:
    def shown(data: str) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    def part(data: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    file = {"type": "image", "source": {"type": "file", "file_id": "file-a"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [*text("a page"), shown("B")]}
    turns = [
        {"role": "user", "content": [*text("Look", "here"), shown("A"), *text("and")]},
        {"role": "user", "content": [file]},
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [result, {**result, "content": [shown("C")]}, shown("D"), *text("What?")]},
    ]
    first, _, page, alone, last = chat(turns)
    assert first["content"] == [
        {"type": "text", "text": "Look\nhere"}, part("A"), {"type": "text", "text": "and"},
        {"type": "file", "file": {"file_id": "file-a"}},
    ]  # fmt: skip
    assert page["content"] == [{"type": "text", "text": "a page"}, part("B")] and alone["content"] == [part("C")]
    assert last["content"] == [part("D"), {"type": "text", "text": "What?"}]
    where = list(places_of_images(request(messages=turns).messages))
    assert where[:3] == ["messages[0].content[2]", "messages[1].content[0]", "messages[3].content[0].content[1]"]
    assert len(where) == 5


def test_documents_are_text_and_one_that_a_tool_has_brought_is_named_where_it_is_not() -> None:
    plain = {"type": "document", "title": "notes", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
    parts = {"type": "document", "source": {"type": "content", "content": text("b", "c")}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
    words = "[a document, which you cannot read]"
    result = {"type": "tool_result", "tool_use_id": "t", "content": [parts, pdf]}
    asked = request(
        messages=[
            {"role": "user", "content": [plain]},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [result, pdf]},
        ]
    )
    said, _, brought, last = asked.chat("").model_dump()["messages"]
    assert said["content"] == "notes\na" and brought["content"] == f"b\nc\n{words}" and last["content"] == words
    assert asked.unused("", bounded=False) == ["messages.document"]


def test_a_passage_of_a_client_s_own_search_is_text_wherever_it_stands() -> None:
    found = {"type": "search_result", "source": "https://a.b", "title": "T", "content": text("b", "c")}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [found, *text("d")]}
    turns = [[found, *text("q")], [USE], [result]]
    asked = request(
        messages=[{"role": ("user", "assistant")[at % 2], "content": each} for at, each in enumerate(turns)]
    )
    said, _, brought = asked.chat("").model_dump()["messages"]
    assert said["content"] == "T\nhttps://a.b\nb\nc\nq" and brought["content"] == "T\nhttps://a.b\nb\nc\nd"
    assert asked.unused("", bounded=False) == []
    with pytest.raises(ValidationError, match="search_result"):
        request(messages=[*HELLO, {"role": "assistant", "content": [found]}])


def test_clients_know_by_its_words_that_a_worker_s_memory_holds_no_such_conversation() -> None:
    for message in ("9 tokens need 90 bytes of KV; this worker has 50", "prompt is too long: 9 tokens > 8 maximum"):
        told = json.loads(anthropic_error(ContextLengthExceededError(message, param="messages"), "r"))["error"]
        assert told["message"].startswith("prompt is too long: 9 tokens")


def test_an_agent_may_bring_the_tools_of_many_servers() -> None:
    tools = [{"name": f"mcp__server_{at}__do", "input_schema": {"type": "object"}} for at in range(513)]
    assert len(served(request(tools=tools[:512]).chat("").tools)) == 512
    with pytest.raises(ValidationError, match="at most 512"):
        request(tools=tools)


def test_what_other_servers_tools_did_and_edits_of_the_context_are_left_out_and_named() -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    turns = [*HELLO, {"role": "assistant", "content": [search, found, *text("So it is.")]}, *HELLO]
    asked = request(messages=turns, context_management={"edits": [{"type": "clear_tool_uses_20250919"}]})
    assert [each.content for each in asked.chat("").messages] == ["hi", "So it is.", "hi"]
    left_out = ["messages.server_tool_use", "messages.web_search_tool_result"]
    assert asked.unused("", bounded=False) == [*left_out, "context_management.clear_tool_uses_20250919"]


def test_tools_that_are_not_there_are_left_out_and_named() -> None:
    turns = [{"role": "user", "content": "hi"}]
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    asked = MessagesRequest.model_validate(
        {"messages": turns, "max_tokens": 9, "tools": [search, TOOL], "mcp_servers": [{}]}
    )
    chat = asked.chat("")
    assert [tool.function.name for tool in served(chat.tools)] == [TOOL["name"]]
    assert [tool.type for tool in unserved(chat.tools)] == ["web_search_20250305"]
    assert asked.unused("", bounded=False) == ["mcp_servers"]
