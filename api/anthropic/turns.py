"""The turns of a message request: their content blocks, and the messages of a chat that they come to.

Invariant. Turns that come again make the same messages again, so that what a worker has read of a conversation is found
in its prefix cache when the next turn is asked for.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag, WithJsonSchema

from api.http.fields import HistoryModel, Off, RequestModel, complaint
from api.openai.tools import by_type, known_type
from shared.errors import InvalidRequestError

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


class ToolReferenceBlock(HistoryModel):
    """A tool that a search for tools has found: from here on the model knows it."""

    type: Literal["tool_reference"]
    tool_name: str


ResultPart = Annotated[
    Annotated[
        Annotated[TextBlock, Tag("<text>")] | Annotated[ToolReferenceBlock, Tag("<tool_reference>")], by_type("text")
    ],
    known_type("text", "tool_reference"),
]


class ToolResultBlock(HistoryModel):
    """What a call brought."""

    off: ClassVar[Off] = {"toolset_name": ()}

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[ResultPart], BeforeValidator(_parts), _ONE_OR_MANY] | None = None
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


class ChatWriter:
    """Writes turns as messages of a chat. Turns of one role that follow each other are one, as Anthropic has them.

    `tools`: the definitions of those that results may refer to. `system_anywhere`: whether the model's template has a
    place for what the system says in the middle of a conversation; else the user says it.
    """

    def __init__(self, tools: Mapping[str, dict[str, Any]], *, system_anywhere: bool = True) -> None:
        self._tools = tools
        self._system_role = "system" if system_anywhere else "user"
        self.chat: list[dict[str, Any]] = []

    def begin(self, system: Sequence[TextBlock]) -> None:
        """The system prompt, without what is not meant for a model."""
        if told := "\n".join(filter(None, (without_telemetry(block.text) for block in system))):
            self.chat.append({"role": "system", "content": told})

    def add(self, turn: Turn) -> None:
        """The next turn."""
        if turn.role == "assistant":
            self._add_answer(turn.content)
            return
        role = self._system_role if turn.role == "system" and self.chat else turn.role
        texts = []
        for block in turn.content:
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolResultBlock):
                self._say(role, texts)
                texts = []
                self.chat.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": self._result(block)})
        if texts or not turn.content:
            self._say(role, texts)

    def _say(self, role: str, texts: list[str]) -> None:
        if self.chat and self.chat[-1]["role"] == role:
            texts = [self.chat.pop()["content"], *texts]
        elif not texts:
            return
        self.chat.append({"role": role, "content": "\n".join(texts)})

    def _result(self, block: ToolResultBlock) -> str:
        parts = block.content or ()
        text = "\n".join(part.text if isinstance(part, TextBlock) else self._definition(part) for part in parts)
        return f"Error: {text}" if block.is_error else text

    def _definition(self, found: ToolReferenceBlock) -> str:
        """Of a tool that was found. It stands here and not among the others, so that what is before it in the prompt
        stays as it was."""
        if found.tool_name not in self._tools:
            raise InvalidRequestError(f"no tool is named '{found.tool_name[:128]}'", param="messages")
        return f"<tools>\n{json.dumps(self._tools[found.tool_name], ensure_ascii=False)}\n</tools>"

    def _add_answer(self, blocks: Sequence[RequestModel]) -> None:
        """A turn of the model: reasoning, text, calls."""
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
            for block in blocks
            if isinstance(block, ToolUseBlock)
        ]
        thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        message: dict[str, Any] = {"role": "assistant", "content": _text(blocks)}
        if self.chat and self.chat[-1]["role"] == "assistant" and "tool_calls" not in self.chat[-1]:
            earlier = self.chat.pop()
            message["content"] = earlier["content"] + message["content"]
            thought = earlier.get("reasoning_content", "") + thought
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        self.chat.append(message)


def without_telemetry(text: str) -> str:
    """A text of the system prompt without the lines before it that are meant for Anthropic's own servers. They change
    with each request, so they would make each prompt a new one; to the model they say nothing."""
    at = 0
    while found := _TELEMETRY.match(text, at):
        at = found.end()
    return text[at:]


def _text(blocks: Sequence[RequestModel]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))
