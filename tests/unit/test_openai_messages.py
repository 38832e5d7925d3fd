"""Messages and calls of earlier turns: which are taken, which are refused, what reaches the template."""

from typing import Any

import msgspec
import pytest
from openai.types.responses import ResponseFunctionToolCall

from api.openai.bodies import ChatCompletionRequest, ChatMessage
from api.openai.chat import in_words, named_images
from api.openai.conversations import template_messages
from api.openai.fitting import fitted
from api.openai.responses.body import ResponseRequest
from shared.sequences import VisionSpec
from tests.redis.scripted_worker import CARD
from tests.unit.api_texts import codec
from tests.unit.refusals import HELLO, refusal


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True, "messages": [{"role": "user", "content": ""}]}, "continue_final_message"),
        ({"function_call": {"name": "a"}}, "function_call"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [{"name": "a"}], "tool_choice": "auto"}, "functions"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            "tool_choice.allowed_tools.tools",
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ],
)
def test_calls_and_continuations_that_cannot_be_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert refusal(ChatCompletionRequest, {"messages": HELLO, **body}).param == param


def test_parts_that_are_neither_text_nor_an_image_are_refused_by_name() -> None:
    user = {"role": "user"}
    wrong = [
        ({**user, "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content[0]"),
        ({**user, "content": [{"type": "image_url"}]}, "messages[0].content[0].image_url"),
        ({**user, "content": [{"type": "file", "image_url": "x"}]}, "messages[0].content[0].file"),
        ({**user, "content": [{"type": "image_url", "image_url": {"url": 5}}]}, "messages[0].content[0].image_url.url"),
        ({"role": "system", "content": [{"type": "image_url", "image_url": "x"}]}, "messages[0].content"),
    ]
    for message, param in wrong:
        assert refusal(ChatCompletionRequest, {"messages": [message]}).param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "boss", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
    ],
)
def test_a_malformed_message_is_named(message: dict[str, Any], param: str) -> None:
    assert refusal(ChatCompletionRequest, {"messages": [message]}).param == param


@pytest.mark.parametrize(
    ("fields", "thought"),
    [
        ({"provider_specific_fields": {"refusal": None}, "mood": "good"}, None),
        ({"reasoning_content": "so"}, "so"),
        ({"reasoning": "so", "reasoning_details": [{"type": "reasoning.text", "text": "else"}]}, "so"),
        ({"reasoning_details": [{"type": "reasoning.text", "text": "s"}, {"summary": "o"}, {"data": "x"}, 5]}, "so"),
        ({"thinking_blocks": [{"type": "thinking", "thinking": "so", "signature": "x"}]}, "so"),
        ({"thinking_blocks": [{"type": "redacted_thinking", "data": "x"}]}, None),
        ({"thinking_blocks": "so", "reasoning": 5}, None),
    ],
)
def test_what_libraries_add_to_an_earlier_turn_is_ignored_and_its_reasoning_understood(
    fields: dict[str, Any], thought: str | None
) -> None:
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    (message,) = ChatCompletionRequest.model_validate(
        {"messages": [{"role": "assistant", "content": [part], **fields}]}
    ).messages
    (shown,) = template_messages([message])
    assert shown == {"role": "assistant", "content": "a"} | ({"reasoning_content": thought} if thought else {})


def test_an_unknown_parameter_beside_the_messages_is_still_refused() -> None:
    assert refusal(ChatCompletionRequest, {"messages": HELLO, "mood": "good"}).param == "mood"


def test_an_earlier_call_that_was_cut_off_has_no_arguments() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Ro'}}
    (shown,) = template_messages([ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]})])
    assert shown["tool_calls"][0]["function"]["arguments"] == {}


def test_messages_reach_the_template_as_plain_text() -> None:
    messages = [
        ChatMessage.model_validate({"role": "developer", "content": [{"type": "text", "text": "a"}] * 2}),
        ChatMessage.model_validate(
            {
                "role": "assistant",
                "tool_calls": [{"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            }
        ),
        ChatMessage.model_validate({"role": "tool", "content": "2", "tool_call_id": "1"}),
    ]
    system, assistant, tool = template_messages(messages)
    assert system == {"role": "system", "content": "aa"}
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert tool == {"role": "tool", "content": "2", "tool_call_id": "1"}


def test_what_openai_s_package_dumps_of_a_call_is_an_input_again() -> None:
    call = ResponseFunctionToolCall(type="function_call", call_id="c", name="f", arguments="{}", status="completed")
    asked = ResponseRequest.model_validate({"input": [{"role": "user", "content": "a"}, call.model_dump()]})
    assert asked.chat().messages[1].tool_calls


def test_calls_put_together_from_a_stream_keep_their_index_to_themselves() -> None:
    call = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    (shown,) = template_messages([ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]})])
    assert shown["tool_calls"] == [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]


def test_no_calls_are_no_calls_to_a_template() -> None:
    (shown,) = template_messages([ChatMessage.model_validate({"role": "assistant", "content": "a", "tool_calls": []})])
    assert shown == {"role": "assistant", "content": "a"}


def test_images_of_results_are_shown_by_the_user_after_the_results() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0K"}}
    call = {"id": "c", "function": {"name": "read_file", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a.png"}, image]}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call, call]}, result, result]
    body = ChatCompletionRequest.model_validate({"messages": turns})
    named = [place.where for place in named_images(body.messages)]
    assert named == ["messages[2].content[1]", "messages[3].content[1]"], "where the client has put them"

    def shown(*later: dict[str, Any]) -> list[tuple[str, Any]]:
        whole = ChatCompletionRequest.model_validate({"messages": [*turns, *later]})
        messages = fitted(template_messages(whole.messages, images=True), codec())
        return [(message["role"], message["content"]) for message in messages[2:]]

    brought, seen = [("tool", "a.png")] * 2, [{"type": "image"}] * 2
    assert shown() == [*brought, ("user", seen)]
    said = {"role": "user", "content": "And?"}
    assert shown(said) == [*brought, ("user", [*seen, {"type": "text", "text": "And?"}])], "users and models take turns"
    assert shown({"role": "assistant", "content": "ho"}, said)[2:] == [
        ("user", seen),
        ("assistant", "ho"),
        ("user", "And?"),
    ]
    assert in_words(body, msgspec.structs.replace(CARD, vision=VisionSpec("pixtral", "[IMG]", 9, 8, 128, 1))) is body
    assert in_words(body, CARD).messages[3].content == "a.png\n[an image, which you cannot see]"
