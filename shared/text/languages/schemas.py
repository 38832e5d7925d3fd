"""Schemas of arguments, as grammars of forms that write each argument on its own need them."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from shared.text import grammar
from shared.text.languages.values import types_of

_PLAIN = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "definitions",
        "description",
        "title",
        "default",
    }
) | {"$schema", "$id", "$comment", "examples", "strict"}
OF_TEXT = ("pattern", "minLength", "maxLength", "format")  # that a text without quotes is not held to
MAX_DEPTH = 12  # of schemas that are written out; deeper ones allow any text


class Written:
    """A schema written out as rules; `rules` are those of the whole grammar."""

    def __init__(self, root: dict[str, Any], prefix: str, rules: list[str]) -> None:
        self._root = root
        self._prefix = prefix
        self._rules = rules
        self._count = 0

    def rule(self, lark: str, attributes: str = "") -> str:
        """The name of a new rule."""
        self._count += 1
        name = f"{self._prefix}_{self._count}"
        self._rules.append(f"{name}{attributes}: {lark}")
        return name

    def until(self, mark: str, spelled: grammar.Spelling) -> str:
        """The name of a new rule: any text up to and with a mark."""
        self._count += 1
        name = f"{self._prefix}_{self._count}"
        self._rules.append(spelled.until(name, mark))
        return name

    def resolved(self, schema: Any) -> dict[str, Any]:
        """A schema in the place of a reference to it; {} for `true` and for what cannot be found."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            found: Any = self._root
            for step in str(schema["$ref"]).removeprefix("#/").split("/"):
                found = found.get(step) if isinstance(found, dict) else None
            schema = found
        return schema if isinstance(schema, dict) else {}

    def json(self, schema: dict[str, Any]) -> str:
        """Lark for JSON of a part of the schema."""
        named: dict[str, Any] = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return grammar.inline_schema(grammar.enforceable({**named, **schema})[0])

    def members(self, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
        """Properties of an object, and whether each is required."""
        required = schema.get("required") or ()
        for name, part in (schema.get("properties") or {}).items():
            yield name, self.resolved(part), name in required


def is_free(schema: dict[str, Any]) -> bool:
    """True if a schema names no members, so that there may be any."""
    return not schema.get("properties") and schema.get("additionalProperties", True) is not False


def listed(schema: dict[str, Any]) -> list[Any] | None:
    """The values that a schema lists; None if it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) and values else None


def is_text(schema: dict[str, Any]) -> bool:
    """True if a value may be any text."""
    types = types_of(schema)
    return not types or "string" in types


def chain(parts: list[tuple[str, bool]], separator: str, add: Callable[[str], str]) -> str:
    """Lark for parts in order, of which only those marked True must be there, with a separator between those that
    are; `add` makes a rule."""
    after, first = '""', '""'
    for part, required in reversed(parts):
        rest_after, rest_first = after, first
        after = add(f"{separator} {part} {rest_after}" + ("" if required else f" | {rest_after}"))
        first = add(f"{part} {rest_after}" + ("" if required else f" | {rest_first}"))
    return first


def unheld(parameters: dict[str, Any], texts: bool) -> list[str]:
    """Places of a schema that forms have no rules for which write each argument on its own; `texts`: nor for texts."""
    places = [key for key in parameters if key not in _PLAIN]
    for name, part in (parameters.get("properties") or {}).items():
        if texts and isinstance(part, dict) and is_text(part) and listed(part) is None:
            places += [f"properties.{name}.{key}" for key in OF_TEXT if key in part]
    return places


def as_text(value: Any) -> str:
    """A value as it is written without quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
