"""A completion in Harmony's form (GPT-OSS) taken apart while it streams: messages, each on a channel.

`<|channel|>analysis<|message|>...<|end|>` is reasoning, `<|start|>assistant<|channel|>final<|message|>...` content, and
what a header addresses to a function (`to=functions.NAME`, on whatever channel) is a call. Content is also what the
model says before its calls, on the channel `commentary`. What is addressed to tools that models are trained with and
that no request offers is reasoning. A header is never shown.

The invariant is `Splitter`'s: what comes out does not depend on how the text was cut.
"""

import re
from collections.abc import Generator

from shared.text.languages.families import CHANNEL, END, MESSAGE, START
from shared.text.languages.growing_text import Waiting
from shared.text.languages.json_calls import arguments
from shared.text.languages.mark_search import search_for
from shared.text.languages.pieces import SplitPlan
from shared.text.languages.splitter import Splitter

_STOPS = (END, "<|call|>", "<|return|>")  # of a message; a stop token is not shown, so there may be none
_BORDERS = search_for(*_STOPS, START, CHANNEL)  # models forget to end a message before they begin the next one
_HEADER_ENDS = search_for(MESSAGE, *_STOPS)
_HEADS = (START, CHANNEL, MESSAGE, "<|constrain|>", "to=")  # with which a header begins
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_NAME = re.compile(re.escape(CHANNEL) + r"\s*([a-z]+)")


class Channels(Splitter):
    """Splits one completion that is written in channels."""

    def __init__(self, plan: SplitPlan) -> None:
        super().__init__(plan)
        self._kind = "reasoning" if plan.thinking == "open" else "content"  # or the name of a function, of a call
        self._messages = {"reasoning": 0, "content": 0}  # that have any text
        self._empty = True  # nothing of this message was shown

    def _read(self) -> Generator[None, None, None]:
        header = ""
        if self._plan.thinking == "may":
            header = yield from self._header()
        while True:
            yield from self._message(header)
            if self._text.ended and self._text.at >= len(self._text.text):
                return
            self._text.forget()
            header = yield from self._header()

    def _header(self) -> Waiting[str]:
        """Read the header of a message (author, channel, recipient), which says what it is."""
        text = self._text
        while True:
            begin = text.at
            yield from text.skip()
            known = yield from text.take(*_HEADS)
            text.at = begin
            if not known and (yield from text.peek()):  # a model that does not know the form
                self._kind = "content"
                return ""
            parts: list[str] = []
            mark = yield from text.until(_HEADER_ENDS, parts.append)
            text.at += len(mark)
            if mark == MESSAGE or not mark:
                self._kind = self._kind_of("".join(parts)) if mark else "nothing"
                return "".join(parts) + mark
            # no message came of it

    def _kind_of(self, header: str) -> str:
        if header.lstrip().startswith(f"{START}functions."):  # a result that the model imagines
            return "reasoning"
        recipients = [each for each in _RECIPIENT.findall(header) if each != "assistant"]
        if recipients:
            name: str = recipients[-1].removeprefix("functions.")
            return f"call {name}" if name and (recipients[-1] != name or self.knows(name)) else "reasoning"
        return "reasoning" if _NAME.findall(header)[-1:] == ["analysis"] else "content"

    def _message(self, header: str) -> Waiting[None]:
        """Read a message, and what ends it."""
        text = self._text
        self._empty = True
        if self._kind.startswith("call "):
            begin = text.at
            yield from text.skip()
            if not self._plan.format or not (yield from arguments(text, self, self._kind[5:])):
                text.at, self._kind = begin, "content"
                self._tell(header)
        self.in_reasoning = self._kind == "reasoning"
        self.reasoned = self.reasoned or self.in_reasoning
        mark = yield from text.until(_BORDERS, self._tell)
        self.in_reasoning = False
        text.at += len(mark) if mark in _STOPS else 0

    def _tell(self, text: str) -> None:
        """More of a message; messages of a kind stand in lines of their own."""
        if not text or self._kind not in self._messages:
            return
        if self._empty:
            self._empty = False
            text = "\n" * bool(self._messages[self._kind]) + text
            self._messages[self._kind] += 1
        if self._kind == "reasoning":
            self._think(text)
        else:
            self._show(text)


def splitter_of(plan: SplitPlan) -> Splitter:
    """The splitter for completions of the plan's model."""
    return Channels(plan) if plan.written is not None and plan.written.channels else Splitter(plan)
