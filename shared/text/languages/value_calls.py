"""Calls that are no JSON and yet write values in a syntax of their own: Gemma's braces, and Python's calls."""

import json
import re
from dataclasses import dataclass

from shared.text import grammar
from shared.text.languages import json_text
from shared.text.languages.growing_text import GrowingText, Show, Waiting
from shared.text.languages.mark_search import search_for
from shared.text.languages.schemas import MAX_DEPTH, OF_TEXT, Written, bounds, chain, is_free, is_text, listed, unheld
from shared.text.languages.tool_form import CallSink, Signature, ToolForm
from shared.text.languages.values import as_wanted, types_of, written

_NAME = re.compile(r"[\w.\-/:$]{1,128}")
_KEY = re.compile(r"[A-Za-z_]\w*")
_PLAIN = re.compile(r"[^\\\"']+")
_FREE_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class BracedCalls(ToolForm):
    """`call:NAME{key:value,...}`, with texts between two marks `quote`."""

    quote: str = ""
    before: str = "call:"

    def read(self, text: GrowingText, sink: CallSink, bare: bool = False) -> Waiting[bool]:
        """Read a call. It has begun with the brace after its name."""
        if not (yield from text.take(self.before)):
            return False
        parts: list[str] = []
        mark = yield from text.until(search_for("{", "<", "}"), parts.append)
        name = "".join(parts).strip()
        if mark != "{" or not _NAME.fullmatch(name):
            return False
        sink.begin(name)
        if (yield from self._members(text, sink.add, 0)):
            sink.end()
        elif not text.ended or text.at < len(text.text):
            yield from text.until(search_for(*(end for _, end in self.marks)), sink.add)
            sink.end()
        return True

    def _members(self, text: GrowingText, show: Show, depth: int) -> Waiting[bool]:
        text.at += 1
        show("{")
        between = ""
        while True:
            yield from text.skip()
            if (yield from text.peek()) == "}":
                text.at += 1
                show("}")
                return True
            parts: list[str] = []
            yield from text.take(self.quote)
            if not (yield from text.until(search_for(":", "}", "{"), parts.append)).startswith(":"):
                return False
            text.at += 1
            yield from text.skip()
            key = "".join(parts).strip().removesuffix(self.quote).strip("\"'")
            show(f"{between}{_quoted(key)}:")
            if not (yield from self._value(text, show, depth)):
                return False
            yield from text.skip()
            letter = yield from text.peek()
            if letter not in ("}", ","):
                return False
            between = ","
            text.at += letter == ","

    def _value(self, text: GrowingText, show: Show, depth: int) -> Waiting[bool]:
        letter = yield from text.peek()
        if depth > MAX_DEPTH:
            return False
        if letter == "{":
            return (yield from self._members(text, show, depth + 1))
        if letter == "[":
            return (yield from self._items(text, show, depth + 1))
        if letter == '"':
            return (yield from json_text.string(text, show))
        if (yield from text.take(self.quote)):
            show('"')
            mark = yield from text.until(search_for(self.quote), lambda more: show(_quoted(more)[1:-1]), whole=True)
            if mark:
                text.at += len(mark)
                show('"')
            return bool(mark)
        parts: list[str] = []  # a word, or what should have been a text
        if not (yield from text.until(search_for(",", "}", "]", *(end for _, end in self.marks)), parts.append)):
            return False
        word = "".join(parts).strip()
        show(json_text.literal(word) or _quoted(word))
        return True

    def _items(self, text: GrowingText, show: Show, depth: int) -> Waiting[bool]:
        text.at += 1
        show("[")
        between = ""
        while True:
            yield from text.skip()
            if (yield from text.peek()) == "]":
                text.at += 1
                show("]")
                return True
            show(between)
            if not (yield from self._value(text, show, depth)):
                return False
            yield from text.skip()
            letter = yield from text.peek()
            if letter not in ("]", ","):
                return False
            between = ","
            text.at += letter == ","

    def rule(self, function: Signature, at: int, spelled: grammar.Spelling, rules: list[str]) -> str:
        """The name, and arguments in the order of the schema."""
        root = function.parameters or {}
        schema = Written(root, f"f{at}", rules)
        return f"{spelled(self.before + function.name)} {self._object(schema, root, spelled, 0)}"

    def _object(self, schema: Written, part: dict[str, object], spelled: grammar.Spelling, depth: int) -> str:
        if is_free(part) or depth > MAX_DEPTH:
            one = f'{_FREE_KEY} ":" {self._words(schema, spelled)}'
            return schema.rule(f'"{{" ({one} ("," {one})*)? "}}"')
        parts = [
            (f"{spelled(name + ':')} {self._any(schema, each, spelled, depth + 1)}", required)
            for name, each, required in sorted(schema.members(part), key=lambda member: member[0])  # as templates do
        ]
        return schema.rule(f'"{{" {chain(parts, grammar.literal(","), schema.rule)} "}}"')

    def _any(self, schema: Written, part: dict[str, object], spelled: grammar.Spelling, depth: int) -> str:
        values, types = listed(part), types_of(part)
        if values is not None:
            quote = self.quote
            texts = [f"{quote}{each}{quote}" if isinstance(each, str) else json.dumps(each) for each in values]
            return "(" + " | ".join(map(spelled, texts)) + ")"
        ways = [self._words(schema, spelled)] if is_text(part) else []
        if "object" in types:
            ways.append(self._object(schema, part, spelled, depth))
        if "array" in types:
            item = (
                self._any(schema, schema.resolved(part.get("items")), spelled, depth + 1) if depth < MAX_DEPTH else ""
            )
            none = part.get("maxItems") == 0 or not item
            more = "" if part.get("maxItems") == 1 else f'("," {item}){bounds(part, 1)}'
            some = f"({item} {more}){'' if part.get('minItems') else '?'}"
            ways.append(schema.rule('"[" "]"' if none else f'"[" {some} "]"'))
        scalars = sorted(types & {"number", "integer", "boolean", "null"})
        if scalars and not is_text(part):
            kept = {key: value for key, value in part.items() if key not in ("properties", "items", "anyOf", "oneOf")}
            ways.append(schema.json({**kept, "type": scalars}))
        return "(" + " | ".join(ways) + ")"

    def _words(self, schema: Written, spelled: grammar.Spelling) -> str:
        return f"{spelled(self.quote)} {schema.until(self.quote, spelled)}"

    def unheld(self, parameters: dict[str, object]) -> list[str]:
        """Keywords of the schema that are not enforced: of the object as a whole, and of texts."""
        return unheld(parameters, texts=True)


@dataclass(frozen=True)
class PythonCalls(ToolForm):
    """`name(key=value, ...)`, in a list or each in a line of its own."""

    def read(self, text: GrowingText, sink: CallSink, bare: bool = False) -> Waiting[bool]:
        """Read a call. It begins with the parenthesis after its name, without marks only for a known function."""
        if self.marks:
            return (yield from self._call(text, sink))
        yield from text.take("[")
        begun = False
        while True:  # a list without marks, whose calls only the first one shows to be some
            yield from text.skip()
            if not (yield from self._call(text, sink)):
                return begun
            begun = True
            yield from text.skip()
            if not (yield from text.take(",")):
                yield from text.take("]")
                return True

    def _call(self, text: GrowingText, sink: CallSink) -> Waiting[bool]:
        start = text.at
        yield from text.word()
        name = text.text[start : text.at]
        if (yield from text.peek()) != "(" or not _NAME.fullmatch(name) or name[0].isdigit():
            return False
        if not (self.marks or sink.knows(name)):
            return False
        text.at += 1
        sink.begin(name)
        if (yield from self._arguments(text, sink, name)):
            sink.end()
        elif not text.ended or text.at < len(text.text):
            yield from text.until(search_for(")", *(end for _, end in self.marks)), sink.add)
            yield from text.take(")")
            sink.end()
        return True

    def _arguments(self, text: GrowingText, sink: CallSink, name: str) -> Waiting[bool]:
        sink.add("{")
        schemas, between = sink.schemas(name), ""
        while True:
            yield from text.skip()
            if (yield from text.peek()) == ")":
                text.at += 1
                sink.add("}")
                return True
            start = text.at
            yield from text.word()
            key = text.text[start : text.at]
            yield from text.skip()
            if not _KEY.fullmatch(key) or (yield from text.peek()) != "=":
                text.at = start if text.at < len(text.text) else text.at  # broken, or cut off
                return False
            text.at += 1
            yield from text.skip()
            sink.add(f"{between}{_quoted(key)}: ")
            types = types_of(schemas.get(key))
            if types and "string" not in types and (yield from text.peek()) in ('"', "'"):
                parts: list[str] = []
                if not (yield from self._value(text, parts.append, 0)):
                    return False
                sink.add(written(as_wanted(json.loads("".join(parts)), schemas.get(key))))
            elif not (yield from self._value(text, sink.add, 0)):
                return False
            yield from text.skip()
            letter = yield from text.peek()
            if letter not in (",", ")"):
                return False
            between = ", "
            text.at += letter == ","

    def _value(self, text: GrowingText, show: Show, depth: int) -> Waiting[bool]:
        letter = yield from text.peek()
        if depth > MAX_DEPTH or not letter:
            return False
        if letter in "\"'":
            return (yield from self._string(text, show, letter))
        if letter in "[(":
            return (yield from self._items(text, show, "]" if letter == "[" else ")", depth))
        if letter == "{":
            return (yield from self._items(text, show, "}", depth))
        start = text.at
        word = json_text.literal((yield from text.word()))
        if not word:
            text.at = start
            return False
        show(word)
        return True

    def _items(self, text: GrowingText, show: Show, closing: str, depth: int) -> Waiting[bool]:
        text.at += 1
        show("{" if closing == "}" else "[")
        between = ""
        while True:
            yield from text.skip()
            if (yield from text.peek()) == closing:
                text.at += 1
                show("}" if closing == "}" else "]")
                return True
            show(between)
            if closing == "}" and (yield from text.peek()) not in ('"', "'"):
                return False
            if not (yield from self._value(text, show, depth + 1)):
                return False
            yield from text.skip()
            if closing == "}":
                if (yield from text.peek()) != ":":
                    return False
                text.at += 1
                yield from text.skip()
                show(": ")
                if not (yield from self._value(text, show, depth + 1)):
                    return False
                yield from text.skip()
            letter = yield from text.peek()
            if letter not in (",", closing):
                return False
            between = ", "
            text.at += letter == ","

    def _string(self, text: GrowingText, show: Show, quote: str) -> Waiting[bool]:
        """A string. Templates write texts without escaping, so a quote ends it only before what may follow a value."""
        text.at += 1
        show('"')
        while letter := (yield from text.peek()):
            if letter == "\\":
                two = yield from text.count(2)
                if two[1:] == "u":
                    six = yield from text.count(6)
                    known = re.fullmatch(r"\\u[0-9a-fA-F]{4}", six) is not None
                    show(six if known else "\\\\")
                    text.at += 6 if known else 1
                    continue
                text.at += len(two)
                show(_ESCAPES.get(two[1:], _quoted(two)[1:-1]))
            elif letter == quote and (yield from self._ends(text)):
                text.at += 1
                show('"')
                return True
            else:
                plain = _PLAIN.match(text.text, text.at)
                more = letter if plain is None else plain[0]
                text.at += len(more)
                show(_quoted(more)[1:-1])
        return False

    def _ends(self, text: GrowingText) -> Waiting[bool]:
        """True if the quote that comes next ends a string."""
        at = text.at
        text.at += 1
        yield from text.skip()
        letter = yield from text.peek()
        text.at = at
        return not letter or letter in ",)]}:"

    def rule(self, function: Signature, at: int, spelled: grammar.Spelling, rules: list[str]) -> str:
        """The name, and arguments by name in the order of the schema."""
        root = function.parameters or {}
        schema = Written(root, f"f{at}", rules)
        if function.parameters is None or is_free(root):
            one = f'{_FREE_KEY} "=" {schema.json({})}'
            inside = f'({one} (", " {one})*)?'
        else:
            parts = [
                (f"{grammar.literal(name + '=')} {self._written(schema, part)}", required)
                for name, part, required in schema.members(root)
            ]
            inside = chain(parts, grammar.literal(", "), schema.rule)
        return f'{grammar.literal(function.name + "(")} {inside} ")"'

    def _written(self, schema: Written, part: dict[str, object]) -> str:
        """A value: as JSON, which is read as Python's, or where it is a plain one as Python writes it."""
        types, values = types_of(part), listed(part)
        ways = [schema.json(part)]
        if values is not None:
            plain = [each for each in values if isinstance(each, str) and not set(each) & set("'\\\n")]
            ways += [grammar.literal(f"'{each}'") for each in plain]
        elif types == {"string"} and not any(key in part for key in OF_TEXT):
            ways.append(r"""/'([^'\\\n]|\\[nt'"\\])*'/""")
        elif types <= {"boolean", "null"}:
            ways += ['"True" | "False"'] * ("boolean" in types) + ['"None"'] * ("null" in types)
        return f"({' | '.join(ways)})" if len(ways) > 1 else ways[0]

    def unheld(self, parameters: dict[str, object]) -> list[str]:
        """Keywords of the schema that are not enforced: of the object as a whole."""
        return unheld(parameters, texts=False)


_ESCAPES = {
    "n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", '"': '\\"', "'": "'", "/": "/", "\n": "",
}  # fmt: skip
