"""A completion taken apart while it streams: reasoning, content, tool calls.

Invariant. What comes out depends on the text so far only, not on how it was cut into deltas: so a resumed stream goes
on exactly where it stopped. What looked like a call and is none becomes content, so a call comes whole; but a forced
one comes as it grows, because its grammar says that it is one. Blanks before a call go.
"""

import functools
import json
import re
from typing import Any, Literal

import msgspec

from api.generation.tool_formats import ToolFormat, tool_format

_HEAD = re.compile(r'\s*\{"name": ("(?:[^"\\]|\\.)*"), "arguments":\s*(?=\{)')


class GrowingCall:
    """Where one call stands. What it gives depends on the text so far only, not on how the text was cut."""

    def __init__(self) -> None:
        self.name = ""
        self.complete = False  # the arguments' object is closed
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def read_name(self, text: str) -> str | None:
        """What follows the name and the key of the arguments; None while they are not all there."""
        found = _HEAD.match(text)
        if found is None:
            return None
        self.name = json.loads(found[1])
        return text[found.end() :]

    def read_arguments(self, text: str) -> tuple[str, str]:
        """The letters of `text` that belong to the arguments, and the rest behind them."""
        for at, letter in enumerate(text):
            self._step(letter)
            if self.complete:
                return text[: at + 1], text[at + 1 :]
        return text, ""

    def _step(self, letter: str) -> None:
        if self._in_string:
            self._in_string = self._escaped or letter != '"'
            self._escaped = letter == "\\" and not self._escaped
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            self.complete = self._depth == 0


Thinking = Literal["", "open", "may"]


class SplitPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """What to look for in a completion. A part of the reply's plan, so it may lie in Redis for a while."""

    format: str = ""  # of tool calls; "": none are looked for
    tools: bytes = b""  # JSON of their definitions: some forms are read with their types
    parallel: bool = True  # else only the first call counts
    sure: bool = False  # a grammar makes every call a call in Hermes' form
    named: bool = False  # the request named the function: OpenAI's finish_reason is then "stop"
    older: bool = False  # a call is shown in OpenAI's older form, `function_call`
    thinking: Thinking = ""  # open: the prompt ended inside; may: the completion may begin with it
    think_start: str = ""
    think_end: str = ""
    show_thinking: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that must be visible to be found, even as special tokens."""
        calls = (self._format.start, self._format.end) if self.format else ()
        return tuple(mark for mark in (*calls, self.think_start, self.think_end) if mark)

    @property
    def _format(self) -> ToolFormat:
        return tool_format(self.format)


class CallPart(msgspec.Struct):
    """What is new of one tool call."""

    index: int  # of the call in the choice
    name: str = ""  # in its first part
    arguments: str = ""  # the next letters of the JSON
    complete: bool = False  # nothing more of it comes


class Piece(msgspec.Struct):
    """What a delta of text brought."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = []

    def add(self, later: "Piece") -> None:
        """Take in what came right after."""
        self.content += later.content
        self.reasoning += later.reasoning
        for part in later.calls:
            self.add_part(part)

    def add_part(self, part: CallPart) -> None:
        """Take in more of a call, or the next one."""
        if self.calls and self.calls[-1].index == part.index:
            last = self.calls[-1]
            joined = CallPart(part.index, last.name + part.name, last.arguments + part.arguments, part.complete)
            self.calls = [*self.calls[:-1], joined]
        else:
            self.calls = [*self.calls, part]


class Splitter:
    """Takes one choice apart."""

    def __init__(self, plan: SplitPlan) -> None:
        self._plan = plan
        self._format = tool_format(plan.format) if plan.format else None
        self._held = ""
        self._began = False  # content has begun: what led up to it is behind us
        self._state = {"": self._content, "open": self._reasoning, "may": self._perhaps}[plan.thinking]
        self.reasoned = plan.thinking == "open"  # there was reasoning
        self._piece = Piece()
        self._growing = GrowingCall()
        self.calls = 0

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as one can see."""
        return self._state == self._reasoning

    @property
    def in_call(self) -> bool:
        """Whether a call has been shown whose arguments are not all there."""
        return bool(self._growing.name) and not self._growing.complete

    def push(self, text: str) -> Piece:
        """What `text` adds; a part of it may be held back."""
        self._held += text
        return self._take(final=False)

    def flush(self) -> Piece:
        """What was held back, at the end of the completion."""
        return self._take(final=True)

    def _take(self, final: bool) -> Piece:
        self._piece = Piece()
        while self._state(final):
            pass
        return self._piece

    # Each state takes what it can from `_held`; True when another state goes on with the rest.

    def _perhaps(self, final: bool) -> bool:
        start = self._plan.think_start
        begun = self._held.lstrip()
        if begun.startswith(start):
            self._held = begun[len(start) :]
            self._state, self.reasoned = self._reasoning, True
            return True
        if not final and start.startswith(begun):
            return False
        self._state = self._content
        return True

    def _reasoning(self, final: bool) -> bool:
        end = self._plan.think_end
        thought, found, rest = self._held.partition(end)
        if not self._began:
            thought = thought.lstrip("\n")
        if found:
            self._think(thought.rstrip("\n"))
            self._held, self._began = rest, False
            self._state = self._content
            return True
        kept = 0 if final else _ending(thought, end)
        if not final:
            bare = thought[: len(thought) - kept]
            kept += len(bare) - len(bare.rstrip("\n"))
        self._think(thought[: len(thought) - kept] if not final else thought.rstrip("\n"))
        self._held = "" if final else thought[len(thought) - kept :]
        return False

    def _think(self, thought: str) -> None:
        self._began = self._began or bool(thought)
        if self._plan.show_thinking:
            self._piece.reasoning += thought

    def _content(self, final: bool) -> bool:
        if self._plan.thinking and not self._began:
            self._held = self._held.lstrip("\n")  # between the reasoning and the answer
        form = self._format
        if form is None:
            self._say(self._held)
            self._held = ""
            return False
        if form.begins:
            return self._beginning(form, final)
        text, found, rest = self._held.partition(form.start)
        if found:
            self._say(text.rstrip())
            self._held = rest
            self._growing = GrowingCall()
            self._state = self._sure_call if self._plan.sure else self._call
            return True
        kept = 0 if final else _ending(text, form.start)
        if not final:  # blanks before a call are not content
            bare = text[: len(text) - kept]
            kept += len(bare) - len(bare.rstrip())
        elif (self.calls and not text.strip()) or (self._plan.sure and form.start.startswith(text.strip())):
            kept, text = 0, ""  # the blanks behind a call, or a forced one that was cut off in its opening mark
        self._say(text[: len(text) - kept])
        self._held = text[len(text) - kept :]
        return False

    def _beginning(self, form: ToolFormat, final: bool) -> bool:
        """A form whose call is the whole completion."""
        begun = self._held.removeprefix("<|python_tag|>").lstrip()
        if not self._began and begun.startswith(form.start):
            self._held = begun[len(form.start) :]
            self._state = self._call
            return True
        if self._began or begun or final:
            self._say(self._held)
            self._held = ""
        return False

    def _call(self, final: bool) -> bool:
        form = self._format
        assert form is not None, "a call without a form of calls"
        body, found, rest = self._held.partition(form.end) if form.end else (self._held, "", "")
        if not found and not final:
            return False
        if found or not form.end:
            self._made(form, body, found)
        else:
            self._say(form.start + body)  # cut off in the middle
        self._held = rest
        self._state = self._content
        return bool(rest) or final

    def _sure_call(self, final: bool) -> bool:
        """A call that is one whatever follows."""
        form, growing = self._format, self._growing
        assert form is not None, "a call without a form of calls"
        if not growing.name:
            rest = growing.read_name(self._held)
            if rest is None:
                if final:  # cut off before its arguments: neither a call nor anything to read
                    self._held = ""
                return False
            self._piece.add_part(CallPart(self.calls, growing.name))
            self.calls += 1
            self._held = rest
        if not growing.complete:
            arguments, self._held = growing.read_arguments(self._held)
            self._piece.add_part(CallPart(self.calls - 1, "", arguments, growing.complete))
        _, found, rest = self._held.partition(form.end)
        if found:
            self._held = rest
            self._state = self._content
        elif final:
            self._held = ""
        return bool(found)

    def _made(self, form: ToolFormat, body: str, end: str) -> None:
        try:
            calls = form.parse(body, _definitions(self._plan.tools))
        except ValueError:
            self._say(form.start + body + end)
            return
        room = len(calls) if self._plan.parallel else max(0, 1 - self.calls)
        for call in calls[:room]:
            self._piece.add_part(CallPart(self.calls, call.name, call.arguments, complete=True))
            self.calls += 1

    def _say(self, text: str) -> None:
        self._began = self._began or bool(text)
        self._piece.content += text


def _ending(text: str, mark: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


@functools.lru_cache(maxsize=64)
def _definitions(tools: bytes) -> list[dict[str, Any]]:
    definitions: list[dict[str, Any]] = msgspec.json.decode(tools) if tools else []
    return definitions
