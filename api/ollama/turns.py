"""The messages of a chat as Ollama has them, and the messages of an OpenAI chat that they come to.

Ollama's calls have names and no ids. A result belongs to the first call without one that has its name, or else to the
first without one.

Invariant. Messages that come again make the same messages again, so that what a worker has read of a conversation is
found in its prefix cache when the next turn is asked for.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from api.http.fields import HistoryModel, complaint

MAX_TURNS = 4096  # a chat has as many messages


class OllamaFunction(HistoryModel):
    """Name and arguments of a call."""

    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)


class OllamaCall(HistoryModel):
    """A call that the model made in an earlier turn."""

    id: str | None = None
    function: OllamaFunction


class OllamaMessage(HistoryModel):
    """One message: the system's, the user's, the model's, or the result of a call."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = Field(default=None, description="reasoning; the model's template decides if it is shown")
    images: list[str] | None = Field(default=None, description="base64 of image files, as in `data:` URLs or bare")
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = Field(default=None, description="of a result: the function that was called")
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _seen_by_the_model(self) -> "OllamaMessage":
        if self.images and self.role not in ("user", "tool"):
            raise complaint("images", "only a message of role 'user' or 'tool' has images")
        return self


class ChatWriter:
    """Writes messages as those of a chat, with ids for the calls that have none."""

    def __init__(self) -> None:
        self._unanswered: list[tuple[str, str]] = []  # id and name of calls
        self._count = 0
        self.chat: list[dict[str, Any]] = []

    def add(self, message: OllamaMessage) -> None:
        """Append the chat message that a message is equivalent to."""
        shown: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.images:
            shown["content"] = [image_part(image) for image in message.images]
            shown["content"] += [{"type": "text", "text": message.content}] if message.content else []
        if message.role == "assistant":
            if message.thinking:
                shown["reasoning_content"] = message.thinking
            if message.tool_calls:
                shown["tool_calls"] = [self._call(call) for call in message.tool_calls]
        elif message.role == "tool":
            shown["tool_call_id"] = message.tool_call_id or self._answered(message.tool_name)
        self.chat.append(shown)

    def _call(self, call: OllamaCall) -> dict[str, Any]:
        self._count += 1
        name, given = call.function.name, call.function.arguments
        call_id = call.id or f"call_{self._count:08d}"
        self._unanswered.append((call_id, name))
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _answered(self, name: str | None) -> str:
        for at, (call_id, called) in enumerate(self._unanswered):
            if called == name or name is None:
                del self._unanswered[at]
                return call_id
        return self._unanswered.pop(0)[0] if self._unanswered else name or "call"


def image_part(image: str) -> dict[str, Any]:
    """The part of a chat's message that an image is."""
    url = image if image[:5].lower() == "data:" else f"data:image/png;base64,{image}"
    return {"type": "image_url", "image_url": {"url": url}}


def without_oldest(messages: Sequence[OllamaMessage], turns: int) -> list[OllamaMessage]:
    """The messages without so many of the oldest turns, each of which begins with the user; the system's stay."""
    starts = turn_starts(messages)
    first = starts[turns] if turns else 0
    return [each for at, each in enumerate(messages) if at >= first or each.role == "system"]


def turn_starts(messages: Sequence[OllamaMessage]) -> list[int]:
    """Index of the first message of each turn."""
    return [0, *(at for at, each in enumerate(messages) if at and each.role == "user")]
