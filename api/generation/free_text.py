"""Tools that take free text in the place of JSON: the function of one text that the model calls, and calls of it.

A call's text is shown when it is whole, as its JSON may break within an escaped letter.
"""

import json
from collections.abc import Sequence
from typing import Any

import pydantic_core

from shared.text.languages.pieces import CallPart, ReplyPiece

INPUT = "input"  # the function's one argument
ONE_TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


def held_to(regex: str) -> dict[str, Any]:
    """The schema of arguments whose one text matches a regular expression."""
    return {**ONE_TEXT, "properties": {INPUT: {"type": "string", "pattern": f"^(?:{regex})$"}}}


def arguments_of(text: str) -> str:
    """The arguments that stand for the text of a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """The text of a custom tool in a call's arguments, which may be cut off; all of them where they are another's."""
    try:
        found = pydantic_core.from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = found.get(INPUT) if isinstance(found, dict) and len(found) <= 1 else None
    return text if isinstance(text, str) else "" if found == {} else arguments


class TextCalls:
    """The calls of one choice, of which those of such tools get their text in the place of arguments."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._held: dict[int, str] = {}  # arguments of calls that are not whole, by the call's index

    def take(self, piece: ReplyPiece, *, ended: bool) -> None:
        """Change the calls of the next piece; `ended`: no other comes."""
        parts, piece.calls = piece.calls, []
        for part in parts:
            if part.name in self._names:
                self._held[part.index] = ""
            if part.index not in self._held:
                piece.add_part(part)
                continue
            self._held[part.index] += part.arguments
            if part.name:
                piece.add_part(CallPart(part.index, part.name, custom=True))
            if part.complete:
                piece.add_part(self._whole(part.index))
        for index in list(self._held) if ended else ():
            piece.add_part(self._whole(index))

    def _whole(self, index: int) -> CallPart:
        return CallPart(index, "", input_of(self._held.pop(index)), complete=True, custom=True)
