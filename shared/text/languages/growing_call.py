"""A forced call in Hermes' form while it grows: its name, then its arguments letter by letter."""

import json
import re

_HEAD = re.compile(r'\s*\{"name": ("(?:[^"\\]|\\.)*"), "arguments":\s*(?=\{)')


class GrowingCall:
    """Where one call stands. What it gives depends on the text so far only, not on how the text was cut."""

    def __init__(self) -> None:
        self.name = ""
        self.complete = False  # the arguments' object is closed
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def read_name(self, text: str) -> str | None:
        """Reads the name of the function and returns the text after the key of the arguments; None until both are
        complete."""
        found = _HEAD.match(text)
        if found is None:
            return None
        self.name = json.loads(found[1])
        return text[found.end() :]

    def read_arguments(self, text: str) -> tuple[str, str]:
        """The letters of `text` that belong to the arguments, and the rest after them."""
        for at, letter in enumerate(text):
            self._step(letter)
            if self.complete:
                return text[: at + 1], text[at + 1 :]
        return text, ""

    def _step(self, letter: str) -> None:
        if self._in_string:
            self._in_string = self._escaped or letter != '"'
            self._escaped = letter == "\\" and not self._escaped
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            self.complete = self._depth == 0
