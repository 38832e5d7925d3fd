"""A completion taken apart while it streams: reasoning, content, tool calls.

Invariant. What comes out depends on the text so far only, not on how it was cut into deltas: so a resumed stream goes
on exactly where it stopped. What looked like a call and is none becomes what it stood in, content or reasoning, so a
call comes whole; but a forced one comes as it grows, because its grammar says that it is one. Blanks before a call go.
"""

import functools
from typing import Any

import msgspec

from shared.text.languages.growing_call import GrowingCall
from shared.text.languages.mark_search import search_for
from shared.text.languages.pieces import CallPart, ReplyPiece, SplitPlan
from shared.text.languages.tool_formats import ParsedCall, ToolFormat, names_of, tool_format

_CALL_KEYS = ("name", "type", "id", "parameters", "arguments")  # one of which an object that is a call begins with


class Splitter:
    """Splits one completion into reasoning, content and tool calls."""

    def __init__(self, plan: SplitPlan) -> None:
        self._plan = plan
        self._format = tool_format(plan.format) if plan.format else None
        self._tools = _definitions(plan.tools)
        self._names = names_of(self._tools)
        self._thinks_again = (
            plan.think_start if plan.form is not None and plan.form.again else ""
        )  # the mark with which it does
        openers = _openers(self._format)
        self._calls = search_for(*openers)
        self._ends = search_for(*openers, self._thinks_again)  # of content
        self._thought_ends = search_for(plan.think_end, *openers)
        self._held = ""
        self._lead = ""  # what stands between the content and what may be a call; it goes if that is one
        self._began = False  # content, or reasoning, has begun: what led up to it is over
        self._alone = True  # no text was shown before, or after the last call
        self._state = {"": self._content, "open": self._reasoning, "may": self._perhaps}[plan.thinking]
        self.reasoned = plan.thinking == "open"  # there was reasoning
        self._piece = ReplyPiece()
        self._growing = GrowingCall()
        self._read: tuple[str, list[ParsedCall]] | None = None  # the last text that was parsed, and its calls
        self._scanned = 0  # letters of a possible call that `_growing` has read
        self.calls = 0

    @property
    def in_reasoning(self) -> bool:
        """True if the next text is reasoning, as far as the text so far shows."""
        return self._state == self._reasoning

    @property
    def in_call(self) -> bool:
        """True if a call has been shown whose arguments are incomplete."""
        return bool(self._growing.name) and not self._growing.complete

    def push(self, text: str) -> ReplyPiece:
        """The pieces that `text` adds. The end of it may be held back until more is known."""
        self._held += text
        return self._take(final=False)

    def flush(self) -> ReplyPiece:
        """The pieces that were held back, at the end of the completion."""
        return self._take(final=True)

    def _take(self, final: bool) -> ReplyPiece:
        self._piece = ReplyPiece()
        while self._state(final):
            pass
        return self._piece

    # Each state takes what it can from `_held`; True when another state goes on with the rest.

    def _perhaps(self, final: bool) -> bool:
        start = self._plan.think_start
        begun = self._held.lstrip()
        if begun.startswith(start):
            self._held = begun[len(start) :]
            self._think_on()
            return True
        if not final and start.startswith(begun):
            return False
        self._state = self._content
        return True

    def _think_on(self) -> None:
        self._state, self.reasoned, self._began = self._reasoning, True, False

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
        call = self._unclosed_call(thought, final)
        pending = len(thought) - call if call >= 0 else 0 if final else self._thought_ends.ending(thought)
        said = thought[: len(thought) - pending].rstrip("\n")
        self._think(said)
        if not final:
            self._held = thought[len(said) :]
            return False
        self._held = ""
        if call >= 0:
            self._held, self._began = thought[call:], False
            self._state = self._content
        return call >= 0

    def _unclosed_call(self, thought: str, final: bool) -> int:
        """Where a call begins in reasoning that nothing has closed so far; -1: nowhere.

        Some models forget to close it. A call that they only think of is followed by the rest of their reasoning and
        its end, so what may be one is held back until there is either end.
        """
        form = self._format
        if form is None or self._plan.sure:
            return -1
        at, mark = self._calls.first(thought)
        while mark:
            body, _, ended = _candidate(form, mark, thought[at:])
            if not ended and not final:
                return at
            calls = self._parsed(form, body) if ended or _ends_openly(form, body) else []
            if calls and (not self._names or all(call.name in self._names for call in calls)):
                return at
            behind, mark = self._calls.first(thought[at + 1 :])
            at += 1 + behind
        return -1

    def _think(self, thought: str) -> None:
        self._began = self._began or bool(thought)
        if self._plan.show_thinking:
            self._piece.reasoning += thought

    def _content(self, final: bool) -> bool:
        form = self._format
        if not self._began and (self._plan.thinking or self.reasoned):
            self._held = self._held.lstrip("\n")  # between the reasoning and the answer
        at, mark = self._ends.first(self._held)
        if mark and mark == self._thinks_again:
            self._show(self._held[:at])
            self._held = self._held[at + len(mark) :]
            self._think_on()
            return True
        if mark and form is not None:
            bare = len(self._without_blanks(self._held[:at]))
            self._show(self._held[:bare])
            self._lead, self._held = self._held[bare:at], self._held[at:]
            self._begin(form, mark)
            return True
        pending = 0
        if not final:
            pending = self._ends.ending(self._held)
            if form is not None:
                pending = len(self._held) - len(self._without_blanks(self._held[: len(self._held) - pending]))
        elif form is not None and self._is_no_text(form, self._held):
            self._held = ""
        self._show(self._held[: len(self._held) - pending])
        self._held = self._held[len(self._held) - pending :]
        return False

    def _without_blanks(self, text: str) -> str:
        """A text without what may stand between it and a call: after a call, all that only separates calls."""
        between = self._format.between if self._format is not None else ""
        if self._alone and self.calls and all(letter.isspace() or letter in between for letter in text):
            return ""
        return text.rstrip()

    def _is_no_text(self, form: ToolFormat, rest: str) -> bool:
        """True if the end of a completion is only the closing of a call, or the cut opening mark of a forced one."""
        after_a_call = self._alone and self.calls and not self._without_blanks(rest)
        return bool(after_a_call) or (self._plan.sure and form.start.startswith(rest.strip()))

    def _begin(self, form: ToolFormat, mark: str) -> None:
        """Look for a call at a mark that is at the beginning of what is held."""
        self._growing, self._scanned = GrowingCall(), 0
        if self._plan.sure:
            self._lead, self._held = "", self._held[len(mark) :]
            self._state = self._sure_call
        elif not form.start:
            self._state = self._object
        elif form.bare is not None and mark == form.bare[0]:
            self._state = self._bare_call
        else:
            self._state = self._call

    def _call(self, final: bool) -> bool:
        """A call between its marks."""
        form = self._form
        body, rest, ended = _candidate(form, form.start, self._held)
        if not ended and not final:
            return False
        calls = self._parsed(form, body) if ended or _ends_openly(form, body) else []
        self._settle(calls, self._held[: len(self._held) - len(rest)])
        self._held = rest
        self._state = self._content
        return True

    def _bare_call(self, final: bool) -> bool:
        """A call without its opening mark: only one of a function that there is."""
        form = self._form
        assert form.bare is not None, "a form without such marks"
        body, rest, ended = _candidate(form, form.bare[0], self._held)
        if not ended and not final:
            return False
        calls = self._parsed(form, body) if ended else []
        calls = calls if all(call.name in self._names for call in calls) else []
        self._settle(calls, body)
        self._held = rest
        self._state = self._closing if calls else self._content
        return True

    def _closing(self, final: bool) -> bool:
        """The closing mark of a call that has no opening one; it may be missing as well."""
        end, rest = self._form.end, self._held.lstrip()
        if rest.startswith(end):
            self._held = rest[len(end) :]
        elif not final and end.startswith(rest):
            return False
        self._state = self._content
        return True

    def _object(self, final: bool) -> bool:
        """A call that is an object without marks. Between words it must be a whole one of a function that there is."""
        form = self._form
        bare = self._held.removeprefix(form.lead)
        body = bare.lstrip()
        before = bare[: len(bare) - len(body)]
        if not body and not final:
            return False
        if not _may_be_call(body):
            self._settle([], before + body[:1])
            self._held = body[1:]
            self._state = self._content
            return True
        read, _ = self._growing.read_arguments(body[self._scanned :])
        self._scanned += len(read)
        if not self._growing.complete and not final:
            return False
        text = body[: self._scanned]
        calls = self._parsed(form, text) if self._growing.complete else []
        known = all(call.name in self._names for call in calls)
        complete = '"parameters"' in text or '"arguments"' in text
        fits = known or complete if self._alone else known and complete
        self._settle(calls if fits else [], before + text)
        self._held = body[self._scanned :]
        self._state = self._content
        return True

    def _sure_call(self, final: bool) -> bool:
        """A call that is one whatever follows."""
        form, growing = self._form, self._growing
        if not growing.name:
            rest = growing.read_name(self._held)
            if rest is None:
                if final:  # cut off before its arguments: neither a call nor anything to read
                    self._held = ""
                return False
            self._add(CallPart(self.calls, growing.name))
            self.calls += 1
            self._held = rest
        if not growing.complete:
            arguments, self._held = growing.read_arguments(self._held)
            self._add(CallPart(self.calls - 1, "", arguments, growing.complete))
        _, found, rest = self._held.partition(form.end)
        if found:
            self._held = rest
            self._state = self._content
        elif final:
            self._held = ""
        return bool(found)

    @property
    def _form(self) -> ToolFormat:
        assert self._format is not None, "a call without a form of calls"
        return self._format

    def _parsed(self, form: ToolFormat, body: str) -> list[ParsedCall]:
        """The calls of a text; none when it is malformed. What is held back may be looked at once a delta."""
        if self._read is None or self._read[0] != body:
            try:
                self._read = body, form.parse(body, self._tools)
            except ValueError:
                self._read = body, []
        return self._read[1]

    def _settle(self, calls: list[ParsedCall], text: str) -> None:
        """Show what was read of a text: its calls, or as it stands."""
        lead, self._lead = self._lead, ""
        if not calls:
            self._show(lead + text)
            return
        room = len(calls) if self._plan.parallel else max(0, 1 - self.calls)
        for call in calls[:room]:
            self._add(CallPart(self.calls, call.name, call.arguments, complete=True))
            self.calls += 1

    def _add(self, part: CallPart) -> None:
        self._piece.add_part(part)
        self._began = self._alone = True

    def _show(self, text: str) -> None:
        self._began = self._began or bool(text)
        self._alone = self._alone and not text
        self._piece.content += text


def _openers(form: ToolFormat | None) -> tuple[str, ...]:
    """The marks with which a call may begin."""
    if form is None or form.name == "harmony":
        return ()
    bare = () if form.bare is None else form.bare[:1]
    return (form.start, *bare) if form.start else tuple(filter(None, ("{", form.lead)))


def _candidate(form: ToolFormat, mark: str, text: str) -> tuple[str, str, bool]:
    """Parts of a text that begins with a mark: the body of its call, the text after it, and True if the call is
    closed."""
    if form.bare is not None and mark == form.bare[0]:
        body, found, rest = text.partition(form.bare[1])
        return body + found, rest, bool(found)
    body, found, rest = text[len(mark) :].partition(form.end) if form.end else (text[len(mark) :], "", "")
    return body, rest, bool(found)


def _ends_openly(form: ToolFormat, body: str) -> bool:
    """True if a call may be complete without its closing mark, at the end of a completion."""
    return not form.end or (form.bare is not None and body.rstrip().endswith(form.bare[1]))


def _may_be_call(text: str) -> bool:
    """True if a text may be the beginning of an object that is a call."""
    if not text.startswith("{"):
        return False
    inside = text[1:].lstrip()
    key, closed, rest = inside[1:].partition('"')
    known = key in _CALL_KEYS if closed else any(each.startswith(key) for each in _CALL_KEYS)
    if known and key == "type":  # many objects begin with one
        kind = rest.lstrip().removeprefix(":").lstrip()
        known = '"function"'.startswith(kind) or kind.startswith('"function"')
    return not inside or (inside[0] == '"' and known)


@functools.lru_cache(maxsize=64)
def _definitions(tools: bytes) -> list[dict[str, Any]]:
    definitions: list[dict[str, Any]] = msgspec.json.decode(tools) if tools else []
    return definitions
