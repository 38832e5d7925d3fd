"""Values of arguments, by their schemas: which types one may have, and what a text that spells one stands for."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

Schemas = Mapping[str, Any]  # of a function's arguments, by name

_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
    "string": (str,),
}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS: dict[str, Any] = {"True": True, "False": False, "None": None}


def types_of(schema: Any) -> frozenset[str]:
    """Types that values of a schema may have; empty: not known."""
    if not isinstance(schema, dict):
        return frozenset()
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        return frozenset([kinds] if isinstance(kinds, str) else filter(_is_text, kinds))
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(listed, list):
        return frozenset(name for name, types in _TYPES.items() if any(_is_of(each, name, types) for each in listed))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = [types_of(each) for each in schema[key]]
            return frozenset().union(*parts) if all(parts) else frozenset()
    return frozenset()


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_of(value: Any, name: str, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and (not isinstance(value, bool) or name == "boolean")


def fits(value: Any, types: frozenset[str]) -> bool:
    """True if a value has one of the types."""
    return any(_is_of(value, name, _TYPES[name]) for name in types if name in _TYPES)


def as_wanted(value: str, schema: Any) -> Any:
    """A string as what it spells, where its schema has types and none of them is a string."""
    types = types_of(schema)
    if not types or "string" in types:
        return value
    read = _spelled(value)
    return read if fits(read, types) else value


def of_text(text: str, schema: Any) -> Any:
    """The value of a text that was written without quotes: what it spells, where the schema has a place for that."""
    types = types_of(schema)
    if types == {"string"}:
        return text
    read = _spelled(text.strip())
    if isinstance(read, float) and read.is_integer() and "integer" in types and "number" not in types:
        read = int(read)
    return read if not types or fits(read, types) else text


def number_of(text: str, schema: Any) -> str:
    """The number that a text spells, with all its digits and any exponent, where the schema has a place for one."""
    types, number = types_of(schema), text.strip()
    if not _NUMBER.fullmatch(number) or (types and not types & {"number", "integer"}):
        return ""
    return number if not types or "number" in types or number.lstrip("-").isdecimal() else ""


def _spelled(text: str) -> Any:
    """The value that a text spells as JSON, or as a literal of Python; else the text."""
    if text in _LITERALS:
        return _LITERALS[text]
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        pass
    if text[:1] in ("[", "{"):
        try:
            return json.loads(text, strict=False)  # lines that break within strings
        except (ValueError, RecursionError):
            pass
        try:
            read = ast.literal_eval(text)
            return read if written(read) else text
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            pass
    return text


def written(value: Any) -> str:
    """A value as JSON; "" for one that JSON has no place for."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return ""
