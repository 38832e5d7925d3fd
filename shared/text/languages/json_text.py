"""JSON in a text that grows: shown letter by letter, with what models often write wrong mended.

Mended are lines that break within strings, backslashes that escape nothing, a comma before a closing bracket, and
`True`, `False` and `None`. A reader returns False at the first letter that is no JSON, or where the text ends.
"""

import json
import re

from shared.text.languages.growing_text import GrowingText, Show, Waiting
from shared.text.languages.values import Schemas, as_wanted, types_of, written

MAX_DEPTH = 100
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


def string(text: GrowingText, show: Show) -> Waiting[bool]:
    """A string with its quotes, of which the first is the next letter."""
    text.at += 1
    show('"')
    while letter := (yield from text.peek()):
        plain = _PLAIN.match(text.text, text.at)
        if plain is not None:
            show(plain[0])
            text.at = plain.end()
        elif letter == "\\":
            yield from _escape(text, show)
        else:
            text.at += 1
            show(letter if letter == '"' else json.dumps(letter)[1:-1])
            if letter == '"':
                return True
    return False


def _escape(text: GrowingText, show: Show) -> Waiting[None]:
    two = yield from text.count(2)
    if len(two) < 2:  # cut off
        text.at += len(two)
        show(two)
        return
    escaped = two[1:]
    if escaped == "u" and not _HEX.fullmatch((yield from text.count(6))[2:]):
        escaped = ""
    text.at += 2 if escaped else 1
    show(two if escaped and escaped in '"\\/bfnrtu' else "'" if escaped == "'" else "\\\\" + escaped)


def decoded(text: GrowingText) -> Waiting[str | None]:
    """The value of a string, whose first quote is the next letter; None where it is cut off."""
    parts: list[str] = []
    if not (yield from string(text, parts.append)):
        return None
    value: str = json.loads("".join(parts))
    return value


def literal(word: str) -> str:
    """A number, a truth value or null as JSON; "" for any other word."""
    return word if _NUMBER.fullmatch(word) else _LITERALS.get(word, "")


def value(text: GrowingText, show: Show, wanted: Schemas | None = None, depth: int = 0) -> Waiting[bool]:
    """Any value. `wanted`: schemas of an object's members; a string becomes what its schema wants, if it spells one."""
    letter = yield from text.peek()
    if letter == '"':
        return (yield from string(text, show))
    if letter and letter in "{[":
        return depth < MAX_DEPTH and (yield from _container(text, show, letter, wanted or {}, depth + 1))
    start = text.at
    word = literal((yield from text.word()))
    if not word:
        text.at = start
        return False
    show(word)
    return True


def _container(text: GrowingText, show: Show, opening: str, wanted: Schemas, depth: int) -> Waiting[bool]:
    closing = "}" if opening == "{" else "]"
    text.at += 1
    show(opening)
    between = ""  # to be shown before the next member
    while True:
        blanks = yield from text.skip()
        letter = yield from text.peek()
        if letter == closing:
            text.at += 1
            show(closing)
            return True
        show(between + blanks)
        member = _member(text, show, wanted, depth) if opening == "{" else value(text, show, None, depth)
        if not (yield from member):
            return False
        show((yield from text.skip()))
        letter = yield from text.peek()
        if letter != "," and letter != closing:
            return False
        between = "," if letter == "," else ""
        text.at += bool(between)


def _member(text: GrowingText, show: Show, wanted: Schemas, depth: int) -> Waiting[bool]:
    if (yield from text.peek()) != '"':
        return False
    key: list[str] = []

    def show_key(more: str) -> None:
        key.append(more)
        show(more)

    if not (yield from string(text, show_key)):
        return False
    show((yield from text.skip()))
    if (yield from text.peek()) != ":":
        return False
    text.at += 1
    show(":" + (yield from text.skip()))
    schema = wanted.get(json.loads("".join(key))) if wanted else None
    types = types_of(schema)
    if not types or "string" in types or (yield from text.peek()) != '"':
        return (yield from value(text, show, None, depth))
    spelled = yield from decoded(text)
    if spelled is not None:
        show(written(as_wanted(spelled, schema)))
    return spelled is not None
