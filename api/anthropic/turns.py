"""The turns of a message request: their content blocks, and the messages of a chat that they come to.

Invariant. Turns that come again make the same messages again, so that what a worker has read of a conversation is found
in its prefix cache when the next turn is asked for.
"""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag, WithJsonSchema

from api.http.fields import HistoryModel, Off, RequestModel, complaint
from api.openai.tools import by_type, known_type

MAX_TURNS = 4096  # a chat has as many messages
# What Claude Code writes for Anthropic's billing before its system prompt: `x-anthropic-billing-header: ...; cch=...;`
_TELEMETRY = re.compile(r"\s*x-anthropic-[a-z0-9-]+:[^\n]*(?:\n+|\Z)")


class TextBlock(HistoryModel):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(HistoryModel):
    """What the model thought; its template decides whether it sees that again."""

    type: Literal["thinking"]
    thinking: str = ""


class RedactedThinkingBlock(HistoryModel):
    """Thinking that another server has encrypted: it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(HistoryModel):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_ONE_OR_MANY = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})

Text = Annotated[list[Annotated[TextBlock, known_type("text")]], BeforeValidator(_parts), _ONE_OR_MANY]


class ToolResultBlock(HistoryModel):
    """What a call brought."""

    off: ClassVar[Off] = {"toolset_name": ()}

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[
        Annotated[TextBlock, Tag("<text>")]
        | Annotated[ThinkingBlock, Tag("<thinking>")]
        | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
        | Annotated[ToolUseBlock, Tag("<tool_use>")]
        | Annotated[ToolResultBlock, Tag("<tool_result>")],
        by_type("text"),
    ],
    known_type("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]
Blocks = Annotated[list[Block], BeforeValidator(_parts), _ONE_OR_MANY]


class Turn(HistoryModel):
    """One message: the user's, the model's, or in the middle of a conversation the system's."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


def check_last(turns: Sequence[Turn]) -> None:
    """Refuse a last turn of the assistant that leaves nothing to go on with."""
    last = turns[-1].content
    if turns[-1].role == "assistant" and (not _text(last) or any(isinstance(each, ToolUseBlock) for each in last)):
        reason = "the last message is the assistant's, and the answer goes on with it: it must be text, not a tool use"
        raise complaint("messages", reason)


def messages_of(system: list[TextBlock] | None, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The turns as messages of a chat. Turns of one role that follow each other are one, as Anthropic has them."""
    chat: list[dict[str, Any]] = []
    if told := "\n".join(filter(None, (without_telemetry(block.text) for block in system or ()))):
        chat.append({"role": "system", "content": told})
    for turn in turns:
        if turn.role == "assistant":
            _add_answer(chat, turn.content)
        else:
            _add_said(chat, turn.role, turn.content)
    return chat


def without_telemetry(text: str) -> str:
    """A text of the system prompt without the lines before it that are meant for Anthropic's own servers. They change
    with each request, so they would make each prompt a new one; to the model they say nothing."""
    at = 0
    while found := _TELEMETRY.match(text, at):
        at = found.end()
    return text[at:]


def _add_said(chat: list[dict[str, Any]], role: str, blocks: Sequence[RequestModel]) -> None:
    """A turn of the user or the system: its texts, and what calls have brought."""
    texts = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            _say(chat, role, texts)
            texts = []
            chat.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)})
    if texts or not blocks:
        _say(chat, role, texts)


def _say(chat: list[dict[str, Any]], role: str, texts: list[str]) -> None:
    if chat and chat[-1]["role"] == role:
        texts = [chat.pop()["content"], *texts]
    elif not texts:
        return
    chat.append({"role": role, "content": "\n".join(texts)})


def _result(block: ToolResultBlock) -> str:
    text = "\n".join(part.text for part in block.content or ())
    return f"Error: {text}" if block.is_error else text


def _add_answer(chat: list[dict[str, Any]], blocks: Sequence[RequestModel]) -> None:
    """A turn of the model: reasoning, text, calls."""
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    message: dict[str, Any] = {"role": "assistant", "content": _text(blocks)}
    if chat and chat[-1]["role"] == "assistant" and "tool_calls" not in chat[-1]:
        earlier = chat.pop()
        message["content"] = earlier["content"] + message["content"]
        thought = earlier.get("reasoning_content", "") + thought
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    chat.append(message)


def _text(blocks: Sequence[RequestModel]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))
