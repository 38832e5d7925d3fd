"""The content blocks of an answer, and the events that report them as they grow.

A block is thinking, text or the use of a tool; one is open at a time. The same writer makes the blocks of a whole
answer, whose events are not read, so both say the same.
"""

import base64
import hashlib
from typing import Any

import pydantic_core

from shared.text.languages.pieces import CallPart, ReplyPiece

Event = dict[str, Any]

_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}  # type of one, and its field


class BlockWriter:
    """Turns pieces of a completion into blocks and events. `base` names the uses of tools."""

    def __init__(self, base: str, shows_thinking: bool) -> None:
        self._base = base
        self._shows_thinking = shows_thinking  # else its blocks come without their text
        self._written: list[str] = []  # of the open block
        self._open = False
        self.blocks: list[dict[str, Any]] = []  # complete but for the open one, which is the last

    def take(self, piece: ReplyPiece) -> list[Event]:
        """The events of a piece: reasoning, then content, then calls."""
        events: list[Event] = []
        if piece.reasoning:
            events += self._grow("thinking", piece.reasoning)
        if piece.content:
            events += self._grow("text", piece.content)
        for part in piece.calls:
            events += self._call(part)
        return events

    def end(self) -> list[Event]:
        """Events that close the content block that is open, if any."""
        if not self._open:
            return []
        self._open = False
        block, text = self.blocks[-1], "".join(self._written)
        events: list[Event] = []
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        elif block["type"] == "thinking":
            block |= {"thinking": text if self._shows_thinking else "", "signature": _signature(text)}
            events = [self._delta({"type": "signature_delta", "signature": block["signature"]})]
        else:
            block["text"] = text
        return [*events, {"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _grow(self, kind: str, text: str) -> list[Event]:
        events = [] if self._open and self.blocks[-1]["type"] == kind else self._begin(_empty(kind))
        self._written.append(text)
        name, field = _DELTAS[kind]
        if kind == "thinking" and not self._shows_thinking:
            return events
        return [*events, self._delta({"type": name, field: text})]

    def _call(self, part: CallPart) -> list[Event]:
        events: list[Event] = []
        if part.name:
            use = {"type": "tool_use", "id": f"toolu_{self._base}{part.index:02d}", "name": part.name, "input": {}}
            events += self._begin(use)
        if part.arguments:
            self._written.append(part.arguments)
            events.append(self._delta({"type": "input_json_delta", "partial_json": part.arguments}))
        return events + (self.end() if part.complete else [])

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        events = self.end()
        self._open, self._written = True, []
        self.blocks.append(block)
        return [*events, {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _empty(kind: str) -> dict[str, Any]:
    return {"type": "text", "text": ""} if kind == "text" else {"type": "thinking", "thinking": "", "signature": ""}


def _object(text: str) -> dict[str, Any]:
    """The input of a call; of one that was cut off what is there, as the SDKs read a stream's."""
    try:
        found = pydantic_core.from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _signature(thought: str) -> str:
    """Clients send it back with the block, and some ask that it is there. It is not looked at again."""
    return base64.b64encode(hashlib.sha256(thought.encode(errors="replace")).digest()).decode()
