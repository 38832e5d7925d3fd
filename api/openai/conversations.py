"""From messages to prompt ids: the chat template, what it is told of tools, and where it leaves the model."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from api.openai.completions import ENCODE_IN_THREAD_CHARS
from api.openai.messages import ChatMessage
from api.openai.pieces import SplitPlan, Thinking
from api.openai.thinking import behind_thinking, marks_of, thinking_after, thinking_within
from api.openai.tools import ToolUse, for_template, knows_tools
from shared.errors import InvalidRequestError
from shared.text import TextCodec

_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatFields(Protocol):
    """What the template needs of a request."""

    @property
    def messages(self) -> list[ChatMessage]:
        """The chat."""

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None:
        """Variables of the template."""

    @property
    def add_generation_prompt(self) -> bool | None:
        """Whether the answer begins."""

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
    text = _rendered(codec, body, tools, variables)
    ids = await _encoded(codec, text, bool(body.add_special_tokens))
    goes_on = bool(body.continue_final_message)
    marks = marks_of(codec) if goes_on or body.add_generation_prompt is not False else None
    thinking: Thinking = "" if marks is None else thinking_after(text, marks)
    if goes_on and thinking == "may" and marks is not None:  # it cannot begin with reasoning any more
        thinking = thinking_within(_last_text(body.messages), marks)
    return Conversation(codec, ids, tools, thinking, marks)


async def encoded_chat(codec: TextCodec, body: ChatFields) -> list[int]:
    """Ids of a chat through the model's template."""
    return await _encoded(codec, _rendered(codec, body, None, {}), bool(body.add_special_tokens))


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


async def _encoded(codec: TextCodec, text: str, special: bool) -> list[int]:
    """The template writes special tokens itself; long texts are encoded in a thread."""
    if len(text) > ENCODE_IN_THREAD_CHARS:
        return await asyncio.to_thread(codec.encode, text, special)
    return codec.encode(text, special)


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
    except msgspec.DecodeError:
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}
