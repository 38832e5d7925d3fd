"""The `input` of POST /v1/responses: a text or items of earlier turns, and the messages of a chat that they come to."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag, WithJsonSchema, model_validator

from api.http.fields import HistoryModel, Off, complaint
from api.openai.tools import by_type, known_type
from shared.errors import InvalidRequestError

MAX_ITEMS = 4096  # a chat has as many messages


class TextPart(HistoryModel):
    """A part of a message; text alone."""

    off: ClassVar[Off] = {"annotations": ([],), "logprobs": ([],)}

    type: Literal["input_text", "output_text", "text"]
    text: str


class ImagePart(HistoryModel):
    """An image in a user's message: a URL, or a file of /v1/files."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high"] | None = None

    @model_validator(mode="after")
    def _one(self) -> "ImagePart":
        if (self.image_url is None) == (self.file_id is None):
            raise complaint("image_url", "an image has either 'image_url' or 'file_id'")
        return self

    def part(self) -> dict[str, Any]:
        """As a chat has it."""
        if self.file_id is not None:
            return {"type": "file", "file": {"file_id": self.file_id, "detail": self.detail}}
        return {"type": "image_url", "image_url": {"url": self.image_url, "detail": self.detail}}


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


# A text, or parts of one.
Text = Annotated[
    list[Annotated[TextPart, known_type("input_text", "output_text", "text")]],
    BeforeValidator(_parts),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


_TEXTS = ("input_text", "output_text", "text")
# The same with images in between.
Seen = Annotated[
    list[
        Annotated[
            Annotated[
                Annotated[TextPart, Tag("<input_text>")]
                | Annotated[TextPart, Tag("<output_text>")]
                | Annotated[TextPart, Tag("<text>")]
                | Annotated[ImagePart, Tag("<input_image>")],
                by_type("text"),
            ],
            known_type(*_TEXTS, "input_image"),
        ]
    ],
    BeforeValidator(_parts),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


def _content(parts: Sequence[TextPart | ImagePart]) -> str | list[dict[str, Any]]:
    """A message's content as a chat has it."""
    texts = [part for part in parts if isinstance(part, TextPart)]
    if len(texts) == len(parts):
        return _joined(texts)
    return [part.part() if isinstance(part, ImagePart) else {"type": "text", "text": part.text} for part in parts]


def _joined(parts: list[TextPart]) -> str:
    return "".join(part.text for part in parts)


class InputMessage(HistoryModel):
    """A message of an earlier turn, or the new one."""

    off: ClassVar[Off] = {"phase": ()}

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Seen
    id: str | None = None
    status: str | None = None


class FunctionCallItem(HistoryModel):
    """A call that the model made."""

    off: ClassVar[Off] = {"namespace": (), "caller": (), "async": (False,), "async_": (False,)}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(HistoryModel):
    """What a call brought."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text
    id: str | None = None
    status: str | None = None


class _Thought(HistoryModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(HistoryModel):
    """What the model thought; its template decides whether it sees that again."""

    off: ClassVar[Off] = {"encrypted_content": ()}

    type: Literal["reasoning"]
    summary: list[_Thought] = Field(default_factory=list)
    content: list[_Thought] | None = None
    id: str | None = None
    status: str | None = None


def _kind(value: Any) -> Any:
    return {"type": "message", **value} if isinstance(value, dict) and "type" not in value else value


Item = Annotated[
    Annotated[
        Annotated[InputMessage, Tag("<message>")]
        | Annotated[FunctionCallItem, Tag("<function_call>")]
        | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
        | Annotated[ReasoningItem, Tag("<reasoning>")],
        by_type("message"),
    ],
    known_type("message", "function_call", "function_call_output", "reasoning"),
    BeforeValidator(_kind),
]


def _items(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        raise complaint("", f"{len(value)} items, and {MAX_ITEMS} is the limit")
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[
    list[Item],
    BeforeValidator(_items),
    Field(min_length=1),
    WithJsonSchema(
        {
            "description": "a text, or the turns so far: messages, function calls, their outputs, reasoning",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
        }
    ),
]


def without_turns(messages: list[dict[str, Any]], skipped: int) -> list[dict[str, Any]]:
    """Messages without the oldest turns: a turn begins with a user's message. What the system says stays."""
    if not skipped:
        return messages
    starts = turn_starts(messages)
    return [each for at, each in enumerate(messages) if at >= starts[skipped] or _is_system(each)]


def turn_starts(messages: list[dict[str, Any]]) -> list[int]:
    """Where each turn begins."""
    return [0, *(at for at, each in enumerate(messages) if at and each["role"] == "user")]


def _is_system(message: dict[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def messages_of(instructions: str | None, given: list[Item]) -> list[dict[str, Any]]:
    """Items as messages: a call belongs to the assistant's message before it, reasoning to the one after."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    thought = ""
    for item in given:
        if isinstance(item, ReasoningItem):
            thought = "".join(part.text for part in item.content or item.summary)
        elif isinstance(item, FunctionOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
        elif isinstance(item, FunctionCallItem):
            function = {"name": item.name, "arguments": item.arguments}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(
                {"id": item.call_id, "type": "function", "function": function}
            )
        else:
            messages.append({"role": item.role, "content": _content(item.content)})
        if thought and messages and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], thought = thought, ""
    if not messages:
        raise InvalidRequestError("'input' has no message", param="input")
    return messages
