"""Calls that write each argument between marks of its own, texts without quotes."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.text import grammar
from shared.text.languages.growing_text import BLANKS, GrowingText, Waiting, finished
from shared.text.languages.mark_search import search_for
from shared.text.languages.schemas import MAX_DEPTH, Written, as_text, bounds, chain, is_free, is_text, listed, unheld
from shared.text.languages.tool_form import CallSink, Signature, ToolForm
from shared.text.languages.values import number_of, of_text, types_of, written

_NAME = re.compile(r"[\w.\-/:$]{1,128}")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_FREE_NAME = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*?)\]\]>\s*", re.DOTALL)


@dataclass(frozen=True)
class Tag:
    """An opening mark with a name in it, such as `<function=NAME>` or `<invoke name="NAME">`."""

    start: str
    end: str
    quote: str = ""  # that ends the name where attributes may follow
    attributes: str = ""  # that a model writes after the name; `{type}` and `{string}` say what the value is
    key: str = ""  # the attribute that is the name, where others may come before it,
    lead: str = ""  # and those that a model writes before it
    types: tuple[tuple[str, str], ...] = ()  # by JSON's names of types: those that `{type}` stands for

    def read(self, text: GrowingText) -> Waiting[tuple[str, dict[str, str]] | None]:
        """Read the mark: the name in it, and attributes; None for no such mark."""
        if self.start and not (yield from text.take(self.start)):
            return None
        parts: list[str] = []
        if not (yield from text.until(search_for(self.end), parts.append)):
            return None
        text.at += len(self.end)
        inside = "".join(parts)
        if self.key:
            found = {key: _unescaped(value) for key, value in _ATTRIBUTE.findall(inside)}
            return found.pop(self.key, ""), found
        name, _, rest = inside.partition(self.quote) if self.quote else (inside, "", "")
        name = _unescaped(name.strip().strip("\"'"))
        return name, {key: _unescaped(value) for key, value in _ATTRIBUTE.findall(rest)}

    def written(self, name: str, kind: str = "", text: bool = False) -> str:
        """The mark as a model writes it."""
        more = self.attributes.format(type=dict(self.types).get(kind, kind), string=str(text).lower())
        key = f"{self.lead}{self.key}={self.quote}" if self.key else ""
        return f"{self.start}{key}{name}{self.quote}{more}{self.end}"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


@dataclass(frozen=True)
class TaggedCalls(ToolForm):
    """A mark with the function's name, marks for each argument, and a closing mark."""

    call: Tag = field(default_factory=lambda: Tag("", ""))
    argument: Tag = field(default_factory=lambda: Tag("", ""))
    opening: str = ""  # what is between the mark of an argument and its value
    closing: str = ""  # what ends a value
    tail: str = ""  # what ends a call
    lines: bool = False  # a value stands in lines of its own
    after_call: str = ""  # what a model writes after the mark with the function's name,
    after_argument: str = ""  # and after each argument

    def read(self, text: GrowingText, sink: CallSink, bare: bool = False) -> Waiting[bool]:
        """Read a call. It has begun with the mark that has its name in it."""
        name = yield from self._name(text)
        if not _NAME.fullmatch(name) or (bare and not (yield from self._is_call(text, sink, name))):
            return False
        sink.begin(name)
        sink.add("{")
        schemas, count, opening = sink.schemas(name), 0, self.opening.removeprefix(grammar.BREAK)
        while True:
            yield from text.skip()
            if self.tail and (yield from text.take(self.tail)):
                break
            begin = text.at
            found = yield from self.argument.read(text)
            if found is None or found[0][:1] in ("", "/"):
                text.at = begin
                if text.ended and self._is_cut(text.text[begin:]):
                    text.at = len(text.text)
                    return True
                break
            key, attributes = found
            yield from text.skip(BLANKS if opening else "")
            if opening and not (yield from text.take(opening)):
                if text.ended and opening.startswith(text.text[text.at :]):
                    text.at = len(text.text)
                    return True  # cut off
                break
            sink.add((", " if count else "") + json.dumps(key, ensure_ascii=False) + ": ")
            count += 1
            if not (yield from self._value(text, sink, schemas.get(key), key, attributes)):
                return True
        sink.add("}")
        sink.end()
        return True

    def _name(self, text: GrowingText) -> Waiting[str]:
        if self.call.end:
            found = yield from self.call.read(text)
            return "" if found is None else found[0]
        if self.call.start and not (yield from text.take(self.call.start)):
            return ""
        name = yield from text.word()  # it stands alone, before the first argument, or what closes the call
        yield from text.skip()
        at = text.at
        closings = filter(None, (self.tail, *(end for _, end in self.marks)))
        followed = yield from text.take(self.argument.start, *closings)
        text.at = at
        return name if followed else ""

    def _is_cut(self, rest: str) -> bool:
        """True if a call cannot be complete of which this is left at the end."""
        begun = self.argument.start.startswith(rest) or rest.startswith(self.argument.start)
        return (begun or self.tail.startswith(rest)) and bool(rest or self.tail)

    def _is_call(self, text: GrowingText, sink: CallSink, name: str) -> Waiting[bool]:
        """True if what follows the name goes on as a call does."""
        at = text.at
        yield from text.skip()
        followed = yield from text.take(self.argument.start, self.tail)
        text.at = at
        return bool(followed) and (sink.knows(name) or not self.marks)

    def _value(
        self, text: GrowingText, sink: CallSink, schema: object, key: str, attributes: dict[str, str]
    ) -> Waiting[bool]:
        """Read a value and what ends it; False: it is cut off."""
        if "string" in attributes or "type" in attributes:  # the model says what it is
            is_string = attributes.get("string") == "true" or attributes.get("type") == "string"
            schema = {"type": "string"} if is_string else {} if schema is None else schema
        closing = search_for(self.closing.format(name=key))
        if schema == {"type": "string"} or types_of(schema) == {"string"}:
            return (yield from self._text(text, sink, closing_of=self.closing.format(name=key)))
        parts: list[str] = []
        mark = yield from text.until(closing, parts.append)
        if not mark:
            return False
        text.at += len(mark)
        spelled = "".join(parts)
        sink.add(number_of(spelled, schema) or written(self._meant(spelled, schema)) or "null")
        return True

    def _meant(self, spelled: str, schema: object) -> object:
        cdata = _CDATA.fullmatch(spelled)
        return of_text(cdata[1] if cdata else self._unlined(spelled), schema)

    def _unlined(self, value: str) -> str:
        return value.removeprefix("\n").removesuffix("\n") if self.lines else value

    def _text(self, text: GrowingText, sink: CallSink, closing_of: str) -> Waiting[bool]:
        """A string, shown as it grows."""
        marks = [closing_of]
        if self.lines:
            yield from text.take("\n")
            marks.insert(0, "\n" + closing_of)
        cdata = yield from text.take("<![CDATA[")
        if cdata:
            marks = ["]]>"]
        sink.add('"')
        mark = yield from text.until(search_for(*marks), lambda more: sink.add(_escaped(more)), whole=True)
        if mark and cdata:
            text.at += len(mark)
            yield from text.skip()
            mark = yield from text.take(closing_of)
        elif mark:
            text.at += len(mark)
        if mark:
            sink.add('"')
        return bool(mark)

    def rule(self, function: Signature, at: int, spelled: grammar.Spelling, rules: list[str]) -> str:
        """The marks of a call around arguments in the order of the schema."""
        root = function.parameters or {}
        schema = Written(root, f"f{at}", rules)
        parts = [
            (self._argument(schema, name, part, spelled), required) for name, part, required in schema.members(root)
        ]
        if (function.parameters is None or is_free(root)) and "{name}" not in self.closing:
            tag = self.argument.written("\0", "string", text=True).partition("\0")
            free = schema.until(self.closing, spelled)
            one = f"{spelled(tag[0])} {_FREE_NAME} {spelled(tag[2] + self._before())} {free}"
            arguments = f"({one} {spelled(self.after_argument) if self.after_argument else ''})*"
        else:
            arguments = chain(parts, '""', schema.rule)
        head = self.call.written(function.name) + self.after_call
        return f"{spelled(head)} {arguments} {spelled(self.tail) if self.tail else ''}"

    def _before(self) -> str:
        return self.opening + ("\n" if self.lines else "")

    def _argument(self, schema: Written, name: str, part: dict[str, object], spelled: grammar.Spelling) -> str:
        types = types_of(part)
        text = is_text(part)
        kind = "string" if text else next((each for each in ("number", "integer") if each in types), next(iter(types)))
        kind = "number" if kind == "integer" else kind
        head = spelled(self.argument.written(name, kind, text=text) + self._before())
        closing = ("\n" if self.lines else "") + self.closing.format(name=name)
        values = listed(part)
        if values is not None:
            value = "(" + " | ".join(spelled(as_text(each) + closing) for each in values) + ")"
        elif text:
            value = schema.until(self.closing.format(name=name), spelled)  # as it is read: a line break may be missing
        else:
            value = f"{schema.json(part)} {spelled(closing)}"
        return schema.rule(f"{head} {value} {spelled(self.after_argument) if self.after_argument else ''}")

    def unheld(self, parameters: dict[str, object]) -> list[str]:
        """Keywords of the schema that are not enforced: of the object as a whole, and of texts."""
        return unheld(parameters, texts=True)


@dataclass(frozen=True)
class NestedCalls(TaggedCalls):
    """Tagged calls whose objects and lists are written in marks, too (MiniMax M3)."""

    item: str = "item"

    def _meant(self, spelled: str, schema: object) -> object:
        if self.argument.start not in spelled:
            return of_text(spelled, schema)
        text = GrowingText(spelled, ended=True)
        return finished(self._nested(text, schema, ""))

    def _nested(self, text: GrowingText, schema: object, closing: str) -> Waiting[object]:
        """The value up to its closing mark."""
        members: dict[str, object] = {}
        items: list[object] = []
        known = schema if isinstance(schema, dict) else {}
        parts: list[str] = []
        search = search_for(*([closing] if closing else []), self.argument.start)
        while (yield from text.until(search, parts.append)) == self.argument.start:
            found = yield from self.argument.read(text)
            if found is None:
                break
            name, part = found[0], None
            if name == self.item and "array" in types_of(known):
                part = known.get("items")
            elif isinstance(known.get("properties"), dict):
                part = known["properties"].get(name)
            value = yield from self._nested(text, part, self.closing.format(name=name))
            items.append(value)
            members[name] = value
        yield from text.take(closing or "\0")
        if not items:
            return of_text("".join(parts), schema)
        return items if set(members) == {self.item} and "array" in types_of(known) else members

    def _argument(self, schema: Written, name: str, part: dict[str, object], spelled: grammar.Spelling) -> str:
        return self._element(schema, name, part, spelled, 0)

    def _element(
        self, schema: Written, name: str, part: dict[str, object], spelled: grammar.Spelling, depth: int
    ) -> str:
        types = types_of(part)
        if depth > MAX_DEPTH or not types & {"object", "array"} or is_text(part):
            return super()._argument(schema, name, part, spelled)
        if "object" in types:
            parts = [
                (self._element(schema, key, each, spelled, depth + 1), required)
                for key, each, required in schema.members(part)
            ]
            inside = chain(parts, '""', schema.rule)
        else:
            item = self._element(schema, self.item, schema.resolved(part.get("items")), spelled, depth + 1)
            inside = "" if part.get("maxItems") == 0 else f"({item}){bounds(part)}"
        head, tail = self.argument.written(name), self.closing.format(name=name)
        return schema.rule(f"{spelled(head)} {inside} {spelled(tail)}")


_LEAF = "raw"
_CLOSERS = {"dict": "}", "list": "]"}


@dataclass(frozen=True)
class TypedCalls(TaggedCalls):
    """Tagged calls whose marks say what each value is: a text, JSON, a `dict` or a `list` of values (Cohere)."""

    def _value(
        self, text: GrowingText, sink: CallSink, schema: object, key: str, attributes: dict[str, str]
    ) -> Waiting[bool]:
        kind = attributes.get("type", _LEAF)
        if kind in _CLOSERS:
            return (yield from self._members(text, sink, kind, 0))
        said = {} if kind == "json" else {"type": "string"}
        return (yield from super()._value(text, sink, said, key, {}))

    def _members(self, text: GrowingText, sink: CallSink, kind: str, depth: int) -> Waiting[bool]:
        """Read values up to the mark that ends them; False: they are cut off or broken."""
        sink.add("{" if kind == "dict" else "[")
        between = ""
        while not (yield from self._closed(text)):
            found = yield from self.argument.read(text)
            if found is None or depth > MAX_DEPTH:
                return False
            name, attributes = found
            sink.add(between + (f"{json.dumps(name, ensure_ascii=False)}: " if kind == "dict" else ""))
            inner = attributes.get("type", _LEAF)
            if inner in _CLOSERS:
                whole = yield from self._members(text, sink, inner, depth + 1)
            else:
                whole = yield from self._value(text, sink, None, name, attributes)
            if not whole:
                return False
            between = ", "
        sink.add(_CLOSERS[kind])
        return True

    def _closed(self, text: GrowingText) -> Waiting[str]:
        yield from text.skip()
        return (yield from text.take(self.closing))

    def _argument(self, schema: Written, name: str, part: dict[str, object], spelled: grammar.Spelling) -> str:
        return self._element(schema, self.argument.written, name, part, spelled, 0)

    def _element(
        self,
        schema: Written,
        mark: Callable[..., str],
        name: str,
        part: dict[str, object],
        spelled: grammar.Spelling,
        depth: int,
    ) -> str:
        """A rule for a value with its marks; `mark` writes the opening one."""
        types, closing = types_of(part), spelled(self.closing)
        values = listed(part)
        if values is not None:
            ways = [spelled(mark(name, _kind(each)) + as_text(each)) for each in values]
            return schema.rule(f"({' | '.join(ways)}) {closing}")
        if is_text(part):
            return schema.rule(f"{spelled(mark(name, 'string'))} {schema.until(self.closing, spelled)}")
        if depth <= MAX_DEPTH and types == {"object"} and not is_free(part):
            parts = [
                (self._element(schema, self.argument.written, key, each, spelled, depth + 1), required)
                for key, each, required in schema.members(part)
            ]
            inside = chain(parts, '""', schema.rule)
        elif depth <= MAX_DEPTH and types == {"array"}:
            items = schema.resolved(part.get("items"))
            item = self._element(schema, self._item, "", items, spelled, depth + 1)
            inside = "" if part.get("maxItems") == 0 else f"({item}){bounds(part)}"
        else:
            return schema.rule(f"{spelled(mark(name, 'number'))} {schema.json(part)} {closing}")
        return schema.rule(f"{spelled(mark(name, next(iter(types))))} {inside} {closing}")

    def _item(self, _: str, kind: str) -> str:
        """The opening mark of a value in a list, which has no name."""
        tag = self.argument
        return f"{tag.start.rstrip()}{tag.attributes.format(type=dict(tag.types)[kind])}{tag.end}"


def _kind(value: object) -> str:
    return "string" if isinstance(value, str) else "number"
