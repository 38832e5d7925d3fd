"""Calls whose arguments are JSON: objects with name and arguments, and arguments after a name between marks."""

import json
import re
from dataclasses import dataclass

from shared.text import grammar
from shared.text.languages import json_text
from shared.text.languages.growing_text import BLANKS, GrowingText, Waiting, finished
from shared.text.languages.mark_search import MarkSearch, search_for
from shared.text.languages.tool_form import CallSink, Signature, ToolForm

_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters")
_FIRST = (*_NAMES[:2], *_ARGUMENTS, "type", "id")  # keys that a call without marks begins with
_WHOLE_NAME = re.compile(r"[\w.\-/:$]{1,128}")


@dataclass(frozen=True)
class JsonCalls(ToolForm):
    """`{"name": ..., "arguments": {...}}`, alone or in a list.

    Without marks it may be any object of an answer: then it is a call at once if it begins with the name of a function
    that there is, and else when it is whole, has arguments, and nothing else is said.
    """

    name_key: str = "name"
    arguments_key: str = "arguments"
    lead: str = ""  # members that a model writes before these

    def read(self, text: GrowingText, sink: CallSink, bare: bool = False) -> Waiting[bool]:
        """Read a call that is an object."""
        if (yield from text.peek()) != "{":
            return False
        text.at += 1
        name, stored, begun = "", "", False
        while True:
            yield from text.skip()
            letter = yield from text.peek()
            if letter == "}":
                break
            key = (yield from self._key(text, bool(name or stored))) if letter == '"' else None
            if key is None:
                return begun
            if key in _NAMES and (yield from text.peek()) == '"' and not begun:
                name = (yield from json_text.decoded(text)) or ""
                if not _WHOLE_NAME.fullmatch(name):
                    return False
                if stored and (self.marks or sink.knows(name)):
                    begun = self._take_stored(name, stored, sink)
            elif key in _ARGUMENTS and not begun:
                if name and (self.marks or sink.knows(name)):
                    begun = yield from arguments(text, sink, name)
                    if not begun:
                        return False
                else:
                    parts: list[str] = []
                    if (yield from text.peek()) not in ('"', "{") or not (
                        yield from json_text.value(text, parts.append)
                    ):
                        return False
                    stored = "".join(parts)
            elif not (yield from self._other(text, key, named=bool(name or stored))):
                return begun
            yield from text.skip()
            if (yield from text.peek()) == ",":
                text.at += 1
            elif (yield from text.peek()) != "}":
                return begun
        text.at += 1
        if begun:
            return True
        fits = bool(self.marks) or (sink.alone and (bool(stored) or sink.knows(name)))
        return bool(name) and fits and self._take_stored(name, stored or "{}", sink)

    def _key(self, text: GrowingText, begun: bool) -> Waiting[str | None]:
        """A key and its colon; None for what cannot be one of a call."""
        if self.marks or begun:
            key = yield from json_text.decoded(text)
        else:
            key = yield from _one_of(text, _FIRST)
        if key is None:
            return None
        yield from text.skip()
        if (yield from text.peek()) != ":":
            return None
        text.at += 1
        yield from text.skip()
        return key

    def _other(self, text: GrowingText, key: str, named: bool) -> Waiting[bool]:
        if not self.marks and key == "type" and not named:  # many objects begin with one
            return (yield from text.peek()) == '"' and (yield from _one_of(text, ("function",))) is not None
        return (yield from json_text.value(text, lambda _: None))

    def _take_stored(self, name: str, stored: str, sink: CallSink) -> bool:
        return finished(arguments(GrowingText(stored, ended=True), sink, name))

    def closers(self, end: str) -> tuple[str, ...]:
        """The ways in which calls may end, with closing brackets or without."""
        return end, f"}}{end}", f"}}]{end}", f"]{end}"

    def rule(self, function: Signature, at: int, spelled: grammar.Spelling, rules: list[str]) -> str:
        """The object, with arguments that follow the function's schema."""
        name = json.dumps(function.name, ensure_ascii=False)
        head = spelled(f'{{{self.lead}"{self.name_key}": {name}, "{self.arguments_key}": ')
        return f"{head} {json_arguments(function)} {grammar.literal('}')}"


@dataclass(frozen=True)
class NamedCalls(ToolForm):
    """A name and a JSON object, with marks before, between and after them."""

    before: str = ""  # the name,
    after: str = ""  # between name and arguments,
    tail: str = ""  # and after these
    prefix: str = ""  # letters before the name that are no part of it
    suffix: str = ""  # and after it: a pattern
    written_suffix: str = ""  # such letters as a grammar writes them
    lists: bool = False  # a list of objects is also a form of it

    def read(self, text: GrowingText, sink: CallSink, bare: bool = False) -> Waiting[bool]:
        """Read a name between its marks, and its arguments."""
        if self.lists:
            two = yield from text.count(2)
            text.at += two[:1] == "[" and two[1:] in ("{", *BLANKS)
            yield from text.skip()
            if (yield from text.peek()) == "{":
                return (yield from JsonCalls(self.name, self.marks).read(text, sink))
        if self.before and not (yield from text.take(self.before)):
            return False
        parts: list[str] = []
        mark = yield from text.until(_ends_of_names(self.after), parts.append)
        if not mark.startswith(self.after.strip() or "\0"):
            return False
        text.at += len(mark)
        yield from text.skip()
        name = "".join(parts).strip().removeprefix(self.prefix)
        name = re.sub(self.suffix, "", name) if self.suffix else name
        if not _WHOLE_NAME.fullmatch(name) or not (yield from arguments(text, sink, name)):
            return False
        if self.tail:
            yield from text.skip()
            yield from text.take(self.tail, self.tail.strip())
        return True

    def rule(self, function: Signature, at: int, spelled: grammar.Spelling, rules: list[str]) -> str:
        """The name between its marks, and arguments that follow the function's schema."""
        head = f"{self.before}{self.prefix}{function.name}{self.written_suffix}{self.after}"
        return f"{spelled(head)} {json_arguments(function)} {spelled(self.tail) if self.tail else ''}"

    def closers(self, end: str) -> tuple[str, ...]:
        """The mark that follows arguments, too, and the one before the next name."""
        return end, self.tail.strip(), self.before


def _ends_of_names(mark: str) -> MarkSearch:
    return search_for(mark.strip(), "{", "}")


def arguments(text: GrowingText, sink: CallSink, name: str) -> Waiting[bool]:
    """Read the arguments of a call, which begins with them. What is broken in them is told as it stands, up to the end
    of the line or of the text; False: they are no object, and no call has begun."""
    letter = yield from text.peek()
    if letter == '"':  # some models write the object as a string
        spelled = yield from json_text.decoded(text)
        if spelled is None:
            return False
        sink.begin(name)
        inner = GrowingText(spelled.strip() or "{}", ended=True)
        if not (inner.text.startswith("{") and finished(json_text.value(inner, sink.add, sink.schemas(name)))):
            sink.add(inner.text[inner.at :])
    elif letter == "{":
        sink.begin(name)
        if not (yield from json_text.value(text, sink.add, sink.schemas(name))):
            yield from text.until(_BREAKS, sink.add)
            if not text.ended or text.at < len(text.text):
                sink.end()
            return True
    else:
        word = yield from text.word() if letter == "n" else _nothing()
        if word != "null":
            return False
        sink.begin(name)
        sink.add("{}")
    sink.end()
    return True


_BREAKS = search_for("\n", "</", "<|", "[TOOL_CALLS]")


def _nothing() -> Waiting[str]:
    yield from ()
    return ""


def _one_of(text: GrowingText, texts: tuple[str, ...]) -> Waiting[str | None]:
    """A string that is one of these, read no further than it may be one; its first quote is the next letter."""
    text.at += 1
    found = yield from text.take(*(f'{each}"' for each in texts))
    return found[:-1] if found else None


def json_arguments(function: Signature) -> str:
    """Lark for arguments in JSON."""
    if function.parameters is None:
        return grammar.inline_schema({"type": "object"})
    return grammar.inline_schema({"type": "object", **grammar.enforceable(function.parameters)[0]})
