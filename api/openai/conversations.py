"""From messages to prompt ids: the chat template, what it gets of tools, and where it leaves the model.

A template that knows `tools` gets them. For any other the definitions go into the system message in Hermes' words,
calls of earlier turns are written as Hermes writes them, and results come as user turns.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from api.callers.fair_pool import LARGE_CHARS, LARGE_COUNT, aside
from api.openai.bodies import ChatCompletionRequest, ChatFields, ChatMessage
from api.openai.fitting import fitted
from api.openai.tools import ToolUse
from shared.episodes import PlainMessage
from shared.errors import InvalidRequestError, UnsupportedParameterError
from shared.images.chat import ChatImages
from shared.text.codec import TextCodec
from shared.text.grammar import Spelling
from shared.text.languages.families import Reasoning, Thinking
from shared.text.languages.grammars import after_reasoning, framed
from shared.text.languages.language import language_of
from shared.text.languages.pieces import SplitPlan

_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@dataclass(frozen=True)
class RenderedChat:
    """A chat as the model gets it, and what its answer may be made of."""

    prompt: list[int]
    split: SplitPlan | None  # how the answer is taken apart; None: it is content only
    grammar: str  # of the answer; "": anything goes


async def conversation(
    codec: TextCodec,
    body: ChatCompletionRequest,
    tools: ToolUse | None = None,
    wanted: str = "",
    begun: Sequence[int] = (),
    images: ChatImages | None = None,
    **variables: Any,
) -> RenderedChat:
    """Render and encode a chat; `wanted` is the grammar of its answer's content. InvalidRequestError when the template
    refuses it.

    `begun`: ids of an earlier turn, answer included. Where the text begins with theirs, the ids begin with them: text
    that a model has written may have other ids when it is encoded, and then no KV of it would be found.
    """
    text, ids = await _encoded(codec, body, tools, variables, begun, images)
    spelled, language = Spelling(codec), language_of(codec)
    reasoning, thinking = _reasoning(language.reasoning, body, text)
    wanted = framed(wanted, thinking, reasoning, spelled)
    if tools is not None:
        wanted = tools.grammar(codec, wanted)
    if reasoning is not None:
        wanted = after_reasoning(wanted, thinking, reasoning, codec, body.max_reasoning_tokens)
    thinks = reasoning is not None and (bool(thinking) or reasoning.again or reasoning.channels)
    if reasoning is None or not (thinks or reasoning.answer):
        reasoning = None
    if tools is None and reasoning is None:
        return RenderedChat(ids, None, wanted)
    split = SplitPlan(show_thinking=body.include_reasoning is not False)
    if reasoning is not None:
        marks = {"think_start": reasoning.start, "think_end": reasoning.end} if thinks else {}
        split = msgspec.structs.replace(split, thinking=thinking, reasoning=reasoning.name, **marks)
    if tools is not None:
        split = msgspec.structs.replace(
            split,
            format=language.calls,
            tools=msgspec.json.encode(tools.shown),
            parallel=tools.parallel,
            sure=tools.forced,
            named=tools.named,
            older=bool(body.functions),
            custom=tools.custom,
        )
    return RenderedChat(ids, split, wanted)


def _reasoning(reasoning: Reasoning | None, body: ChatFields, prompt: str) -> tuple[Reasoning | None, Thinking]:
    """The marks of the model's reasoning, if the answer may have any, and how the answer begins."""
    goes_on = bool(body.continue_final_message)
    if reasoning is None or (body.add_generation_prompt is False and not goes_on and not reasoning.channels):
        return None, ""
    thinking = reasoning.thinking_after(prompt)
    if goes_on and thinking == "may" and not reasoning.channels:  # it cannot begin with reasoning any more
        begun = _last_text(body.messages)
        thinking = "open" if begun.rfind(reasoning.start) > begun.rfind(reasoning.end) else ""
    return reasoning, thinking


async def encoded_chat(codec: TextCodec, body: ChatFields, tools: ToolUse | None) -> list[int]:
    """Ids of a chat through the model's template."""
    return (await _encoded(codec, body, tools, {}))[1]


async def _encoded(
    codec: TextCodec,
    body: ChatFields,
    tools: ToolUse | None,
    variables: dict[str, Any],
    begun: Sequence[int] = (),
    images: ChatImages | None = None,
) -> tuple[str, list[int]]:
    """Text and ids of a chat, of which the template writes the special tokens itself; off the event loop when large."""

    def encode() -> tuple[str, list[int]]:
        text = _rendered(codec, body, tools, variables, images)
        before = codec.decode(begun, skip_special_tokens=False) if begun else ""
        if before and text.startswith(before):
            return text, [*begun, *codec.encode(text[len(before) :], False)]
        return text, codec.encode(text, bool(body.add_special_tokens))

    large = _is_large(body.messages, tools) or len(begun) > LARGE_CHARS or images is not None
    text, ids = await aside(encode) if large else encode()
    if images is not None:
        images.check(ids)
    return text, ids


def _is_large(messages: Sequence[ChatMessage], tools: ToolUse | None) -> bool:
    count = len(messages) + len(tools.shown if tools is not None else ())
    chars = 0
    for message in messages[:LARGE_COUNT]:
        calls = message.tool_calls or ()
        parts = message.content if isinstance(message.content, list) else ()
        count += len(calls) + len(parts)
        chars += len(message.content or "") + len(message.reasoning_content or "")
        chars += sum(len(part.text) for part in parts) + sum(len(call.function.arguments) for call in calls)
    return count > LARGE_COUNT or chars > LARGE_CHARS


def _rendered(
    codec: TextCodec,
    body: ChatFields,
    tools: ToolUse | None,
    variables: dict[str, Any],
    images: ChatImages | None,
) -> str:
    asked = body.chat_template_kwargs or {}
    if wrong := sorted(asked.keys() & _OWN_VARIABLES):
        raise InvalidRequestError(f"'{wrong[0]}' is not a template variable of its own", param="chat_template_kwargs")
    messages, mark = template_messages(body.messages, images=images is not None), ""
    if body.continue_final_message:
        mark = f"the-end-{secrets.token_hex(12)}"
        messages[-1]["content"] += mark
    text = codec.render_chat(
        for_template(fitted(messages, codec), tools, codec),
        add_generation_prompt=body.add_generation_prompt is not False and not mark,
        tools=tools.shown if tools is not None and "tools" in codec.bundle.chat_template else None,
        **{**variables, **asked},
    )
    text = text if images is None else images.expanded(text)
    if not mark:
        return text
    begun, found, _ = text.rpartition(mark)  # what the template puts after a message ends it
    if not found:
        reason = "the model's chat template does not show the last message's text, so nothing can go on with it"
        raise InvalidRequestError(reason, param="continue_final_message")
    return begun


def _last_text(messages: Sequence[ChatMessage]) -> str:
    content = messages[-1].content
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


def plain(message: ChatMessage) -> PlainMessage:
    """A message as episodes compare it."""
    content = message.content
    text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
    calls = tuple((call.function.name, call.function.arguments) for call in message.tool_calls or ())
    return PlainMessage(message.role, text, calls)


def template_messages(messages: Sequence[ChatMessage], *, images: bool = False) -> list[dict[str, Any]]:
    """Messages as chat templates take them: text as one string, `developer` as `system`, call arguments as objects.

    UnsupportedParameterError for images, unless the caller knows what to do with their marks.
    """
    shown: list[dict[str, Any]] = []
    for message in messages:
        fields = message.model_dump(exclude_none=True)
        if isinstance(message.content, list):
            fields["content"] = "".join(part.text for part in message.content)
        has_images = message.has_images
        if has_images and not images:
            reason = "images are taken by /v1/chat/completions and /v1/responses, and not here"
            raise UnsupportedParameterError(reason, param="messages")
        if has_images and isinstance(message.content, list):
            text = [{"type": "text", "text": part.text} for part in message.content]
            shown_parts = zip(message.content, text, strict=True)
            fields["content"] = [each if part.type == "text" else {"type": "image"} for part, each in shown_parts]
        fields.setdefault("content", "")
        if message.role == "developer":
            fields["role"] = "system"
        if message.tool_calls:
            fields["tool_calls"] = [_with_object_arguments(call.model_dump()) for call in message.tool_calls]
        shown.append(fields)
    return shown


def _with_object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call that `max_tokens` cut has broken arguments. They count as none, as in vLLM: refused, the chat could never
    go on, since the client sends the turn back each time."""
    function = call["function"]
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def for_template(messages: list[dict[str, Any]], use: ToolUse | None, codec: TextCodec) -> list[dict[str, Any]]:
    """Messages for a template; one that does not know tools gets them as text."""
    if "tools" in codec.bundle.chat_template:
        return messages
    plain = [_as_text(message) for message in messages]
    if use is None:
        return plain
    words = _PREAMBLE.format(tools="\n".join(json.dumps(each, ensure_ascii=False) for each in use.shown))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{words}"}, *plain[1:]]
    return [{"role": "system", "content": words}, *plain]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"<tool_call>\n{_written(call['function'])}\n</tool_call>" for call in calls]
    words = "\n".join([text for text in [message["content"]] if text] + written)
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": words}


def _written(function: dict[str, Any]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)


_PREAMBLE = """# Tools

You may call these functions:
<tools>
{tools}
</tools>

To call one, answer with its name and its arguments as JSON, each call within its own tags:
<tool_call>
{{"name": "<name>", "arguments": {{<arguments>}}}}
</tool_call>"""
