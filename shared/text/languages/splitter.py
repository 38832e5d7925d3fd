"""A completion taken apart while it streams: reasoning, content, tool calls.

Invariant. What comes out depends on the text so far only, not on how it was cut into deltas: so a resumed stream goes
on exactly where it stopped. A call comes as it grows, from when it is certain that it is one; how much that takes is
its form's to say. What looked like a call before that and is none becomes what it stood in, content or reasoning. After
that it stays a call, also if it is cut off or malformed: its arguments are then what the model wrote. Blanks before a
call go.
"""

import functools
from collections.abc import Generator
from typing import Any

import msgspec

from shared.text.languages.growing_text import GrowingText, Waiting
from shared.text.languages.mark_search import search_for
from shared.text.languages.pieces import CallPart, ReplyPiece, SplitPlan
from shared.text.languages.tool_form import CallSink, ToolForm
from shared.text.languages.tool_forms import form_of
from shared.text.languages.values import Schemas


class Splitter:
    """Splits one completion into reasoning, content and tool calls."""

    def __init__(self, plan: SplitPlan) -> None:
        self._plan = plan
        self._form = form_of(plan.format) if plan.format else None
        self._functions = _functions(plan.tools)
        self._text = GrowingText()
        self._piece = ReplyPiece()
        self._lead = ""  # blanks that go if a call follows
        self._began = False  # content, or reasoning, has begun: what led up to it is over
        self.alone = True  # no text was shown before, or after the last call
        self.in_reasoning = plan.thinking == "open"  # the next text is reasoning, as far as the text so far shows
        self.in_call = False  # a call has been shown whose arguments are incomplete
        self.reasoned = self.in_reasoning  # there was reasoning
        self.calls = 0
        self._counts = True  # the call that grows is not one too many
        self._reader: Generator[None, None, None] | None = self._read()

    def push(self, text: str) -> ReplyPiece:
        """The pieces that `text` adds. The end of it may be held back until more is known."""
        self._text.text += text
        return self._go_on()

    def flush(self) -> ReplyPiece:
        """The pieces that were held back, at the end of the completion."""
        self._text.ended = True
        return self._go_on()

    def _go_on(self) -> ReplyPiece:
        self._piece = ReplyPiece()
        if self._reader is not None and next(self._reader, self) is self:
            self._reader = None
        return self._piece

    # -- what readers of calls ask and tell

    def knows(self, name: str) -> bool:
        """True if there is a function of this name."""
        return name in self._functions

    def schemas(self, name: str) -> Schemas:
        """Schemas of a function's arguments."""
        return self._functions.get(name, {})

    def begin(self, name: str) -> None:
        """A call of this function begins."""
        self._began = self.alone = True
        self._lead = ""
        self._counts = self._plan.parallel or self.calls == 0
        if self._counts:
            self.in_call = True
            self.calls += 1
            self._piece.add_part(CallPart(self.calls - 1, name))

    def add(self, arguments: str) -> None:
        """Add text to the arguments of the call."""
        if self._counts and arguments:
            self._piece.add_part(CallPart(self.calls - 1, "", arguments))

    def end(self) -> None:
        """The arguments of the call are complete."""
        if self._counts:
            self.in_call = False
            self._piece.add_part(CallPart(self.calls - 1, complete=True))

    # -- readers

    def _read(self) -> Generator[None, None, None]:
        if self._plan.thinking == "may":
            yield from self._perhaps()
        elif self._plan.thinking == "open":
            yield from self._reasoning()
        yield from self._content()

    def _perhaps(self) -> Waiting[None]:
        begin = self._text.at
        yield from self._text.skip()
        if (yield from self._text.take(self._plan.think_start)):
            yield from self._reasoning()
        else:
            self._text.at = begin

    def _reasoning(self) -> Waiting[None]:
        text, end = self._text, self._plan.think_end
        self.in_reasoning, self.reasoned, self._began = True, True, False
        openers = self._form.openers if self._form is not None and not self._plan.sure else ()
        ends = search_for(end, *openers)
        yield from text.skip("\n")
        while True:
            mark = yield from self._thought(ends)
            if mark == end or not mark:
                text.at += len(mark)
                break
            if (yield from self._unclosed_call(mark)):
                break
            self._think(text.text[text.at : text.at + len(mark)])
            text.at += len(mark)
        self.in_reasoning = self._began = False

    def _thought(self, ends: Any) -> Waiting[str]:
        """Show reasoning up to a mark, which is returned; line breaks before the mark go, but for a call's."""
        text = self._text
        while True:
            at, mark = ends.first(text.text, text.at)
            end = at if mark else len(text.text) - (0 if text.ended else ends.ending(text.text, text.at))
            said = text.text[text.at : end]
            bare = said.rstrip("\n")
            if mark and mark != self._plan.think_end:
                self._think(bare)
                text.at += len(bare)
                self._breaks, text.at = said[len(bare) :], end
                return str(mark)
            self._think(bare)
            text.at = end if mark or text.ended else text.at + len(bare)
            if mark or text.ended:
                return str(mark)
            text.forget()
            yield

    _breaks = ""  # before what may be a call in reasoning

    def _unclosed_call(self, mark: str) -> Waiting[bool]:
        """True if a call begins here although nothing has closed the reasoning, which some models forget to do.

        A call that they only think of is followed by the rest of their reasoning and its end, so what may be one is
        held back until there is either end.
        """
        text, begin = self._text, self._text.at
        assert self._form is not None, "a call without a form of calls"
        trial = _Trial(self)
        yield from _calls_at(self._form, mark, text, trial)
        text.at = begin
        breaks, self._breaks = self._breaks, ""
        if trial.complete and all(self.knows(name) or not self._functions for name in trial.names):
            while text.text.find(self._plan.think_end, begin) < 0:
                if text.ended:
                    return True
                yield
        self._think(breaks)
        return False

    def _think(self, thought: str) -> None:
        self._began = self._began or bool(thought)
        if self._plan.show_thinking:
            self._piece.reasoning += thought

    def _content(self) -> Waiting[None]:
        text, form, written = self._text, self._form, self._plan.written
        again = self._plan.think_start if written is not None and written.again else ""
        hidden = (written.hidden if written is not None else ()) + (form.hidden if form is not None else ())
        openers = form.openers if form is not None else ()
        ends = search_for(*hidden, *openers, again)
        while True:
            if not self._began and (self._plan.thinking or self.reasoned):
                yield from text.skip("\n")  # between the reasoning and the answer
            at, mark = ends.first(text.text, text.at)
            whole = text.ended and not self._plan.sure  # else a mark that is cut off is not shown
            end = at if mark else len(text.text) - (0 if whole else ends.ending(text.text, text.at))
            self._say(text.text[text.at : end])
            text.at = end
            if mark and mark == again:
                self._show("")
                text.at += len(mark)
                yield from self._reasoning()
            elif mark and mark in hidden:
                text.at += len(mark)
            elif mark and form is not None:
                if not (yield from _calls_at(form, mark, text, self)):
                    if self._plan.sure and text.ended:  # cut off before it is a call: nothing to read
                        return
                    text.at = end + len(mark)
                    self._show(mark)
            elif text.ended:
                break
            else:
                text.forget()
                yield
        if not (self.alone and self.calls and not self._bare(self._lead)):
            self._show("")

    def _say(self, text: str) -> None:
        """Show text but for blanks at its end, which go if a call follows."""
        text = self._lead + text
        bare = self._bare(text) if self._form is not None else text
        self._lead = text[len(bare) :]
        if bare:
            self._began, self.alone = True, False
            self._piece.content += bare

    def _bare(self, text: str) -> str:
        """A text without what may stand between it and a call: after a call, all that only separates calls."""
        between = self._form.between if self._form is not None else ""
        if self.alone and self.calls and all(letter.isspace() or letter in between for letter in text):
            return ""
        return text.rstrip()

    def _show(self, text: str) -> None:
        """Show text with the blanks before it."""
        text, self._lead = self._lead + text, ""
        self._began = self._began or bool(text)
        self.alone = self.alone and not text
        self._piece.content += text


class _Trial:
    """Takes calls that may be none."""

    def __init__(self, splitter: Splitter) -> None:
        self._splitter = splitter
        self.alone = True
        self.names: list[str] = []
        self.complete = False

    def begin(self, name: str) -> None:
        self.names.append(name)
        self.complete = False

    def add(self, arguments: str) -> None:
        """Ignore arguments: only names are collected."""

    def end(self) -> None:
        self.complete = True

    def knows(self, name: str) -> bool:
        return self._splitter.knows(name)

    def schemas(self, name: str) -> Schemas:
        return self._splitter.schemas(name)


def _calls_at(form: ToolForm, opener: str, text: GrowingText, sink: CallSink) -> Waiting[bool]:
    """Read the calls that begin at an opener, which comes next; False, with nothing told: there are none."""
    end = dict(form.marks).get(opener)
    if end is None:  # a call without the marks around it
        if not (yield from form.read(text, sink, bare=True)):
            return False
        end = form.marks[0][1] if form.marks else ""
        if end:
            at = text.at
            yield from text.skip()
            if not (yield from text.take(end)):
                text.at = at
        return True
    text.at += len(opener)
    begun = False
    while form.many or not begun:
        yield from text.skip(form.between)
        if end and (yield from text.take(end)):
            return begun
        at = text.at
        if not (yield from form.read(text, sink)):
            text.at = at
            break
        begun = True
    if begun and end:
        yield from _close(end, form, text)
    return begun


def _close(end: str, form: ToolForm, text: GrowingText) -> Waiting[None]:
    """Read the closing mark of calls, and what stands before it; nothing where the mark is missing."""
    begin = text.at
    mark = yield from text.until(search_for(end, *form.openers), lambda _: None)
    rest = text.text[begin : text.at].strip()
    if mark == end:
        text.at += len(end)
    elif rest and (mark or not any(each.startswith(rest) for each in form.closers(end))):  # else one that is cut off
        text.at = begin


@functools.lru_cache(maxsize=64)
def _functions(tools: bytes) -> dict[str, Schemas]:
    """Schemas of the arguments of each function, by its name."""
    definitions: list[dict[str, Any]] = msgspec.json.decode(tools) if tools else []
    found: dict[str, Schemas] = {}
    for each in definitions:
        parameters = each["function"].get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        found[each["function"]["name"]] = properties if isinstance(properties, dict) else {}
    return found
