"""A completion in Harmony's form (GPT-OSS) taken apart while it streams: messages, each on a channel.

`<|channel|>analysis<|message|>...<|end|>` is reasoning, `<|start|>assistant<|channel|>final<|message|>...` content, and
what a header addresses to a function (`to=functions.NAME`, on whatever channel) is a call. Content is also what the
model says before its calls, on the channel `commentary`. What is addressed to tools that models are trained with and
that no request offers is reasoning. A header is never shown.

The invariant is `Splitter`'s: what comes out does not depend on how the text was cut.
"""

import re
from typing import Any

import msgspec

from shared.text.languages.families import CHANNEL, END, MESSAGE, START
from shared.text.languages.mark_search import search_for
from shared.text.languages.pieces import ReplyPiece, SplitPlan
from shared.text.languages.splitter import Splitter
from shared.text.languages.tool_formats import called

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
        # Content may be forced calls, in Hermes' form.
        form = plan.format if plan.sure else ""
        self._content_splitter = Splitter(msgspec.structs.replace(plan, reasoning="", thinking="", format=form))
        self._kind = "reasoning" if plan.thinking == "open" else "content"  # or the name of a function, of a call
        self._header_text = ""
        self._messages = {"reasoning": 0, "content": 0}  # that have any text
        self._empty = True  # nothing of this message was shown
        self._state = self._header if plan.thinking == "may" else self._message

    @property
    def in_reasoning(self) -> bool:
        return self._state == self._message and self._kind == "reasoning"

    @property
    def in_call(self) -> bool:
        return self._content_splitter.in_call

    def flush(self) -> ReplyPiece:
        piece = super().flush()
        piece.add(self._content_splitter.flush())
        return piece

    def _header(self, final: bool) -> bool:
        """Reads the header of a message (author, channel, recipient) and opens its part; False while it is cut."""
        begun = self._held.lstrip()
        if begun and not begun.startswith(_HEADS) and (final or not any(head.startswith(begun) for head in _HEADS)):
            self._open("content", "")  # a model that does not know the form
            return True
        at, mark = _HEADER_ENDS.first(self._held)
        if mark == MESSAGE:
            header, self._held = self._held[: at + len(mark)], self._held[at + len(mark) :]
            self._open(self._kind_of(header), header)
        elif mark:  # no message came of it
            self._held = self._held[at + len(mark) :]
        elif final:
            self._held = ""
        return bool(mark)

    def _open(self, kind: str, header: str) -> None:
        self._kind, self._header_text, self._empty = kind, header, True
        self.reasoned = self.reasoned or kind == "reasoning"
        self._state = self._message

    def _kind_of(self, header: str) -> str:
        if header.lstrip().startswith(f"{START}functions."):  # a result that the model imagines
            return "reasoning"
        recipients = [each for each in _RECIPIENT.findall(header) if each != "assistant"]
        if recipients:
            name: str = recipients[-1].removeprefix("functions.")
            return f"call {name}" if name and (recipients[-1] != name or name in self._names) else "reasoning"
        return "reasoning" if _NAME.findall(header)[-1:] == ["analysis"] else "content"

    def _message(self, final: bool) -> bool:
        at, mark = _BORDERS.first(self._held)
        if self._kind.startswith("call "):
            if not mark and not final:
                return False
            self._make_call(self._kind[5:], self._held[:at] if mark else self._held)
        else:
            pending = 0 if mark or final else _BORDERS.ending(self._held)
            at = at if mark else len(self._held) - pending
            self._show(self._held[:at])
        if not mark:
            self._held = "" if final else self._held[at:]
            return False
        self._held = self._held[at + len(mark) if mark in _STOPS else at :]
        self._state = self._header
        return True

    def _make_call(self, name: str, body: str) -> None:
        try:
            arguments = msgspec.json.decode(body, type=dict[str, Any])
            calls = [called(name, arguments, self._tools)] if self._plan.format else []
        except (msgspec.DecodeError, ValueError, RecursionError):  # cut off, or no object
            calls = []
        if calls:
            self._settle(calls, "")
        else:
            self._kind = "content"
            self._show(self._header_text + body)

    def _show(self, text: str) -> None:
        """More of a message; messages of a kind stand in lines of their own."""
        if not text:
            return
        if self._empty:
            self._empty = False
            text = "\n" * bool(self._messages[self._kind]) + text
            self._messages[self._kind] += 1
        if self._kind == "reasoning":
            self._think(text)
            return
        self._piece.add(self._content_splitter.push(text))
        if self._plan.sure:
            self.calls = self._content_splitter.calls


def splitter_of(plan: SplitPlan) -> Splitter:
    """The splitter for completions of the plan's model family."""
    return Channels(plan) if plan.form is not None and plan.form.channels else Splitter(plan)
