"""From the items of an input to the messages of a chat."""

from collections.abc import Sequence
from typing import Any

from api.openai.responses.parts import content_of
from api.openai.responses.turns import (
    AgentMessage,
    CallOutputItem,
    CompactionItem,
    CustomCallItem,
    FunctionCallItem,
    InputMessage,
    Item,
    ItemReference,
    OtherCallItem,
    OtherOutputItem,
    ReasoningItem,
)
from shared.errors import InvalidRequestError, UnsupportedParameterError

Message = dict[str, Any]


def messages_of(instructions: str | None, given: Sequence[Item]) -> list[Message]:
    """Items as messages; InvalidRequestError where there is none among them that the model sees."""
    writer = _ChatWriter()
    if instructions:
        writer.say("system", instructions)
    for item in given:
        writer.add(item)
    if not writer.chat:
        raise InvalidRequestError("'input' has no message", param="input")
    return writer.chat


class _ChatWriter:
    """Writes a chat: a call belongs to the assistant's message before it, reasoning to the one after."""

    def __init__(self) -> None:
        self.chat: list[Message] = []
        self._thought = ""

    def add(self, item: Item) -> None:
        """Append the chat messages that an item is equivalent to."""
        if isinstance(item, ReasoningItem):
            self._thought += item.text
        elif isinstance(item, FunctionCallItem | CustomCallItem):
            self._call(item.call_id, item.name_in_chat, item.arguments)
        elif isinstance(item, CallOutputItem):
            self._result(item.call_id, content_of(item.output))
        elif isinstance(item, InputMessage):
            self.say(item.role, content_of(item.content))
        elif isinstance(item, OtherCallItem):
            self._call(item.called, item.name_in_chat, item.arguments)
            if item.brought is not None:
                self._result(item.called, item.brought)
        elif isinstance(item, OtherOutputItem):
            self._result(item.called, item.text)
        elif isinstance(item, CompactionItem) and item.text:
            self.say("user", f"Summary of the conversation so far:\n\n{item.text}")
        elif isinstance(item, AgentMessage) and item.text:
            self.say("user", item.text)
        elif isinstance(item, ItemReference):
            raise UnsupportedParameterError("references to stored items are not looked up here", param="input")

    def say(self, role: str, content: Any) -> None:
        """Append a message of this role, with the reasoning that came before it."""
        self.chat.append({"role": role, "content": content})
        if role == "assistant":
            self._attach_thought()

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        if not self.chat or self.chat[-1]["role"] != "assistant":
            self.say("assistant", "")
        self._attach_thought()
        function = {"name": name, "arguments": arguments}
        self.chat[-1].setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _result(self, call_id: str, content: Any) -> None:
        self.chat.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _attach_thought(self) -> None:
        if self._thought:
            self.chat[-1]["reasoning_content"], self._thought = self._thought, ""


def without_turns(messages: list[Message], skipped: int) -> list[Message]:
    """Messages without the oldest turns: a turn begins with a user's message. What the system says stays."""
    if not skipped:
        return messages
    starts = turn_starts(messages)
    return [each for at, each in enumerate(messages) if at >= starts[skipped] or _is_system(each)]


def turn_starts(messages: list[Message]) -> list[int]:
    """Index of the first message of each turn."""
    return [0, *(at for at, each in enumerate(messages) if at and each["role"] == "user")]


def _is_system(message: Message) -> bool:
    return message["role"] in ("system", "developer")
