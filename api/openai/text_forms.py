"""The form of a custom tool's text, as a regular expression that its text can be held to.

A call's text is a string in JSON, so a grammar cannot apply to it as it stands, but a string's `pattern` can. A Lark
grammar whose rules do not refer to themselves, such as that of Codex' `apply_patch`, is one regular expression. A
grammar that needs more than that is not enforced.
"""

import json
import re
from collections.abc import Iterator

MAX_REGEX = 20_000  # letters that a grammar may have, or come to
MAX_DEPTH = 32  # rules that refer to one another
_COMMON = {  # terminals that `%import common.NAME` brings
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|//[^\n]*|->[ \t]*\w+)
    |(?P<text>"(?:[^"\\\n]|\\.)*")(?P<i>i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/)(?P<flags>[imslux]*)
    |(?P<repeat>[+*?]|\{\d+(?:,\d*)?\})
    |(?P<name>[a-zA-Z_]\w*)
    |(?P<mark>[()\[\]|])""",
    re.VERBOSE,
)
_RULE = re.compile(r"[?!]?([a-zA-Z_]\w*)(?:\.-?\d+)?[ \t]*:[ \t]*")


class NotRegularError(Exception):
    """The grammar is not one that a regular expression can say, or uses what is not known here."""


def regex_of(syntax: str, definition: str) -> str:
    """The regular expression of a form, for all of the text; "" where there is none."""
    if len(definition) > MAX_REGEX:
        return ""
    if syntax == "regex":
        return definition
    try:
        return _Grammar(definition).regex("start")
    except NotRegularError:
        return ""


class _Grammar:
    """Rules of a Lark grammar by their names."""

    def __init__(self, definition: str) -> None:
        self._rules: dict[str, str] = {}
        self._made: dict[str, str] = {}
        self._making: set[str] = set()
        name = ""
        for line in definition.splitlines():
            if line.startswith("%import"):
                self._add_import(line)
            elif line.startswith("%"):
                raise NotRegularError(line)
            elif found := _RULE.match(line):
                name = found[1]
                self._rules[name] = line[found.end() :]
            elif line.strip() and not line.lstrip().startswith("//"):
                if not name or not (line[0].isspace() or line[0] == "|"):
                    raise NotRegularError(line)
                self._rules[name] += " " + line.strip()

    def _add_import(self, line: str) -> None:
        found = re.fullmatch(r"%import\s+common\.(\w+)(?:\s*->\s*(\w+))?\s*", line)
        if found is None or found[1] not in _COMMON:
            raise NotRegularError(line)
        self._made[found[2] or found[1]] = f"(?:{_COMMON[found[1]]})"

    def regex(self, name: str) -> str:
        """The regular expression of a rule."""
        if name not in self._made:
            if name in self._making or name not in self._rules or len(self._making) > MAX_DEPTH:
                raise NotRegularError(name)
            self._making.add(name)
            made = ""
            for part in self._parts(self._rules[name]):
                made += part
                if len(made) > MAX_REGEX:
                    raise NotRegularError(name)
            self._made[name] = f"(?:{made})"
            self._making.discard(name)
        return self._made[name]

    def _parts(self, text: str) -> Iterator[str]:
        at = 0
        closing: list[str] = []
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise NotRegularError(text[at:])
            at = found.end()
            if found["text"]:
                said = re.escape(json.loads(found["text"]))
                yield f"(?i:{said})" if found["i"] else f"(?:{said})"
            elif found["regex"]:
                flags = found["flags"].replace("x", "").replace("l", "").replace("u", "")
                yield f"(?{flags}:{found['regex'][1:-1]})".replace(r"\/", "/")
            elif found["name"]:
                yield self.regex(found["name"])
            elif found["mark"] in ("(", "["):
                closing.append(")" if found["mark"] == "(" else "]")
                yield "(?:"
            elif found["mark"] in (")", "]"):
                if not closing or closing.pop() != found["mark"]:
                    raise NotRegularError(text)
                yield ")" if found["mark"] == ")" else ")?"
            elif found["mark"] or found["repeat"]:
                yield found["mark"] or found["repeat"]
        if closing:
            raise NotRegularError(text)
