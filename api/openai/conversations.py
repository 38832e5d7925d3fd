"""From messages to prompt ids: the chat template, what it is told of tools, and where it leaves the model."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from api.generation.splitter import SplitPlan, Thinking
from api.openai.messages import ChatMessage
from api.openai.tools import ToolUse, for_template, knows_tools
from api.ring.room import LARGE_CHARS, LARGE_COUNT, aside
from shared.errors import InvalidRequestError
from shared.text import grammar
from shared.text.codec import TextCodec

_MARKS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("[THINK]", "[/THINK]"),
)


def marks_of(codec: TextCodec) -> tuple[str, str] | None:
    """The marks of a model's reasoning; None when its template knows none."""
    template = codec.bundle.chat_template
    return next((marks for marks in _MARKS if marks[1] in template), None)


def thinking_after(prompt: str, marks: tuple[str, str]) -> Thinking:
    """What a completion of this prompt begins with."""
    start, end = marks
    written = prompt.rstrip()
    if written.endswith(start):
        return "open"
    return "" if written.endswith(end) else "may"


def thinking_within(begun: str, marks: tuple[str, str]) -> Thinking:
    """What goes on with a message that has begun so."""
    start, end = marks
    return "open" if begun.rfind(start) > begun.rfind(end) else ""


def behind_thinking(text: str, thinking: Thinking, marks: tuple[str, str], codec: TextCodec) -> str:
    """A grammar that lets the model reason before it begins."""
    if not text or not thinking:
        return text
    thought = grammar.until("thought", marks[1], codec)
    if thinking == "open":
        return grammar.compose(f"start: thought BLANK @body\nBLANK: /\\n{{0,2}}/\n{thought}", {"body": text})
    opening = f"({grammar.mark(marks[0], codec)} thought BLANK)?"
    return grammar.compose(f"start: {opening} @body\nBLANK: /\\n{{0,2}}/\n{thought}", {"body": text})


_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatFields(Protocol):
    """What the template needs of a request."""

    @property
    def messages(self) -> list[ChatMessage]: ...

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...

    @property
    def add_generation_prompt(self) -> bool | None: ...

    @property
    def continue_final_message(self) -> bool | None:
        """Whether the answer goes on with the last message."""

    @property
    def add_special_tokens(self) -> bool | None:
        """Whether the tokenizer adds its own."""


@dataclass(frozen=True)
class Conversation:
    """A chat as the model gets it, and what its answer may be made of."""

    codec: TextCodec
    prompt: list[int]
    tools: ToolUse | None
    thinking: Thinking
    think_marks: tuple[str, str] | None

    def split(self, show_thinking: bool, *, older_calls: bool = False) -> SplitPlan | None:
        """How the answer is taken apart; None when it is content only."""
        if self.tools is None and not self.thinking:
            return None
        start, end = (self.think_marks or ("", "")) if self.thinking else ("", "")
        plan = SplitPlan(thinking=self.thinking, think_start=start, think_end=end, show_thinking=show_thinking)
        if self.tools is None:
            return plan
        return msgspec.structs.replace(
            plan,
            format=self.tools.form(self.codec),
            tools=msgspec.json.encode(self.tools.shown),
            parallel=self.tools.parallel,
            sure=self.tools.forced,
            named=self.tools.named,
            older=older_calls,
        )

    def grammar(self, wanted: str) -> str:
        """The grammar of the answer, of which `wanted` is the one of its content; "" when anything goes."""
        text = wanted if self.tools is None else self.tools.grammar(self.codec, wanted)
        if self.think_marks is None:
            return text
        return behind_thinking(text, self.thinking, self.think_marks, self.codec)


async def conversation(
    codec: TextCodec, body: ChatFields, tools: ToolUse | None = None, **variables: Any
) -> Conversation:
    """Render and encode a chat; InvalidRequestError when the template refuses it."""
    text, ids = await _encoded(codec, body, tools, variables)
    goes_on = bool(body.continue_final_message)
    marks = marks_of(codec) if goes_on or body.add_generation_prompt is not False else None
    thinking: Thinking = "" if marks is None else thinking_after(text, marks)
    if goes_on and thinking == "may" and marks is not None:  # it cannot begin with reasoning any more
        thinking = thinking_within(_last_text(body.messages), marks)
    return Conversation(codec, ids, tools, thinking, marks)


async def encoded_chat(codec: TextCodec, body: ChatFields) -> list[int]:
    """Ids of a chat through the model's template."""
    return (await _encoded(codec, body, None, {}))[1]


def _rendered(codec: TextCodec, body: ChatFields, tools: ToolUse | None, variables: dict[str, Any]) -> str:
    asked = body.chat_template_kwargs or {}
    if wrong := sorted(asked.keys() & _OWN_VARIABLES):
        raise InvalidRequestError(f"'{wrong[0]}' is not a template variable of its own", param="chat_template_kwargs")
    messages, mark = template_messages(body.messages), ""
    if body.continue_final_message:
        mark = f"the-end-{secrets.token_hex(12)}"
        messages[-1]["content"] += mark
    text = codec.render_chat(
        for_template(messages, tools, codec),
        add_generation_prompt=body.add_generation_prompt is not False and not mark,
        tools=tools.shown if tools is not None and knows_tools(codec) else None,
        **{**variables, **asked},
    )
    if not mark:
        return text
    begun, found, _ = text.rpartition(mark)  # what the template puts behind a message ends it
    if not found:
        reason = "the model's chat template does not show the last message's text, so nothing can go on with it"
        raise InvalidRequestError(reason, param="continue_final_message")
    return begun


def _last_text(messages: Sequence[ChatMessage]) -> str:
    content = messages[-1].content
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


async def _encoded(
    codec: TextCodec, body: ChatFields, tools: ToolUse | None, variables: dict[str, Any]
) -> tuple[str, list[int]]:
    """Text and ids of a chat, of which the template writes the special tokens itself; beside the loop when large."""

    def encode() -> tuple[str, list[int]]:
        text = _rendered(codec, body, tools, variables)
        return text, codec.encode(text, bool(body.add_special_tokens))

    return await aside(encode) if _is_large(body.messages, tools) else encode()


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


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: text as one string, `developer` as `system`, call arguments as objects."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        fields = message.model_dump(exclude_none=True)
        if isinstance(message.content, list):
            fields["content"] = "".join(part.text for part in message.content)
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
