"""The output of a response: its items, and the events that report them as they grow.

An item is reasoning, a message or a call; one is open at a time. A call of a tool of a namespace, or of a custom tool,
comes in the form that its client knows. The same writer makes the items of a whole response, whose events are not read.
Text of ours that a client stores unread and sends back, such as reasoning, is *sealed*.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Any

from api.generation.free_text import input_of
from api.generation.logprobs import ChatLogprob
from api.openai.responses.tools import CustomTool, ResponseTool, offered
from shared.text.languages.pieces import CallPart, ReplyPiece

Event = dict[str, Any]

_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}  # kind of item -> its part, in names of events

_PREFIX = "parallm:"


class ItemWriter:
    """Turns pieces of a completion into items and events.

    `name` is in the ids of items, `calls` in those of calls. `seals`: reasoning comes in a form, too, in which clients
    send it back that send no reasoning as text.
    """

    def __init__(self, name: str, calls: str, tools: Sequence[ResponseTool] = (), *, seals: bool = False) -> None:
        self._name = name
        self._named_calls = calls
        self._tools = {each.function.name: each for each in offered(tools)}
        self._seals = seals
        self._arguments = ""  # of the custom tool that is being called, from which its text is made
        self._logprobs: list[ChatLogprob] = []  # of tokens that no text has come of yet
        self.items: list[dict[str, Any]] = []  # as they are now
        self._open = ""  # kind of the last item while it grows: message, reasoning, call, custom
        self._calls = 0

    def take(self, piece: ReplyPiece, logprobs: Sequence[ChatLogprob] = ()) -> list[Event]:
        """The events of a piece: reasoning, then content, then calls. `logprobs`: of its tokens, for the content."""
        events: list[Event] = []
        self._logprobs += logprobs
        if piece.reasoning:
            events += self._grow("reasoning", piece.reasoning)
        if piece.content:
            events += self._grow("message", piece.content)
        elif piece.reasoning or piece.calls:
            self._logprobs.clear()
        for part in piece.calls:
            events += self._call(part)
        return events

    def end(self, incomplete: bool) -> list[Event]:
        """Close what is open. A response without any item gets an empty message."""
        events = [] if self.items else self._begin("message")
        return events + self._close("incomplete" if incomplete else "completed")

    def _grow(self, kind: str, text: str) -> list[Event]:
        events = [] if self._open == kind else [*self._close("completed"), *self._begin(kind)]
        item = self.items[-1]
        item["content"][0]["text"] += text
        more: dict[str, Any] = {}
        if kind == "message":
            more = {"logprobs": [_brief(each) for each in self._logprobs]}
            item["content"][0]["logprobs"] += self._logprobs
            self._logprobs = []
        return [*events, self._event(f"{_TEXTS[kind]}.delta", item, content_index=0, delta=text, **more)]

    def _begin(self, kind: str) -> list[Event]:
        self._open = kind
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item: dict[str, Any] = {"id": self._id("msg"), "type": "message", "role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": self._id("rs"), "type": "reasoning", "summary": []}
        item |= {"status": "in_progress", "content": []}
        added = self._added(item)
        item["content"] = [{**part, "logprobs": []} if kind == "message" else dict(part)]
        return [added, self._event("content_part.added", item, content_index=0, part=part)]

    def _close(self, status: str) -> list[Event]:
        kind, self._open = self._open, ""
        if not kind:
            return []
        item = self.items[-1]
        if kind == "custom":
            return self._close_custom(item)
        item["status"] = status
        if kind == "call":
            said = {"name": item["name"], "arguments": item["arguments"]}
            return [self._event("function_call_arguments.done", item, **said), self._done(item)]
        part = item["content"][0]
        if kind == "reasoning" and self._seals:
            item["encrypted_content"] = sealed(part["text"])
        return [
            self._event(f"{_TEXTS[kind]}.done", item, content_index=0, text=part["text"], **_with_logprobs(part)),
            self._event("content_part.done", item, content_index=0, part=part),
            self._done(item),
        ]

    def _call(self, part: CallPart) -> list[Event]:
        events = self._begin_call(part.name) if part.name else []
        item = self.items[-1]
        if part.arguments and self._open == "custom":
            self._arguments += part.arguments
        elif part.arguments:
            item["arguments"] += part.arguments
            events.append(self._event("function_call_arguments.delta", item, delta=part.arguments))
        return events + (self._close("completed") if part.complete else [])

    def _begin_call(self, name: str) -> list[Event]:
        events = self._close("completed")
        known = self._tools.get(name)
        custom = known is not None and isinstance(known.tool, CustomTool)
        item: dict[str, Any] = {
            "id": self._id("ctc" if custom else "fc"),
            "type": "custom_tool_call" if custom else "function_call",
            "call_id": f"call_{self._named_calls}{self._calls:02d}",
            "name": name if known is None else known.tool.name,
        }
        if known is not None and known.namespace is not None:
            item["namespace"] = known.namespace
        item |= {"input": ""} if custom else {"arguments": "", "status": "in_progress"}
        self._calls += 1
        self._open = "custom" if custom else "call"
        return [*events, self._added(item)]

    def _close_custom(self, item: dict[str, Any]) -> list[Event]:
        """The text comes at once: what its arguments say is known when they have ended."""
        item["input"], self._arguments = input_of(self._arguments), ""
        events = [self._event("custom_tool_call_input.delta", item, delta=item["input"])] if item["input"] else []
        return [*events, self._event("custom_tool_call_input.done", item, input=item["input"]), self._done(item)]

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._name}_{len(self.items):02d}"

    def _added(self, item: dict[str, Any]) -> Event:
        self.items.append(item)
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}

    def _done(self, item: dict[str, Any]) -> Event:
        return {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item)}

    def _event(self, name: str, item: dict[str, Any], /, **fields: Any) -> Event:
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{name}", **place, **fields}


def _with_logprobs(part: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": [_brief(each) for each in part["logprobs"]]} if "logprobs" in part else {}


def _brief(logprob: ChatLogprob) -> dict[str, Any]:
    """As events have it: without bytes."""
    tops = [{"token": top.token, "logprob": top.logprob} for top in logprob.top_logprobs]
    return {"token": logprob.token, "logprob": logprob.logprob, "top_logprobs": tops}


def sealed(text: str) -> str:
    """The text in the form of `encrypted_content`, which many clients send back when they send no other reasoning.

    It is only encoded: its sender may as well have sent the text.
    """
    return _PREFIX + base64.b64encode(text.encode(errors="replace")).decode()


def unsealed(content: str | None) -> str:
    """The text in it; "" for what another server has encrypted."""
    if content is None or not content.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
