"""From the items of an input to the messages of a chat."""

from collections.abc import Sequence
from typing import Any

from api.openai.responses.parts import ImagePart, content_of, text_of
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
    if not (chat := writer.whole()):
        raise InvalidRequestError("'input' has no message", param="input")
    return chat


class _ChatWriter:
    """Writes a chat: a call belongs to the assistant's message before it, reasoning to the one after."""

    def __init__(self) -> None:
        self._chat: list[Message] = []
        self._thought = ""
        self._brought: list[ImagePart] = []  # by calls, whose results are text: the user shows them after the last one

    def add(self, item: Item) -> None:
        """Append the chat messages that an item is equivalent to."""
        if isinstance(item, ReasoningItem):
            self._thought += item.text
        elif isinstance(item, FunctionCallItem | CustomCallItem):
            self._call(item.call_id, item.name_in_chat, item.arguments)
        elif isinstance(item, CallOutputItem):
            self._result(item.call_id, text_of(item.output))
            self._brought += [part for part in item.output if isinstance(part, ImagePart)]
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
        """Append a message, after the images that calls have returned."""
        self._show_what_calls_brought()
        self._chat.append({"role": role, "content": content})
        if role == "assistant":
            self._attach_thought()

    def whole(self) -> list[Message]:
        """The messages of the whole chat."""
        self._show_what_calls_brought()
        return self._chat

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        if not self._chat or self._chat[-1]["role"] != "assistant" or self._brought:
            self.say("assistant", "")
        self._attach_thought()
        function = {"name": name, "arguments": arguments}
        self._chat[-1].setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _result(self, call_id: str, text: str) -> None:
        self._chat.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _attach_thought(self) -> None:
        if self._thought:
            self._chat[-1]["reasoning_content"], self._thought = self._thought, ""

    def _show_what_calls_brought(self) -> None:
        if self._brought:
            self._chat.append({"role": "user", "content": content_of(self._brought)})
            self._brought = []


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
