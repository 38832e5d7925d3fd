"""A text that grows, and what its readers have in common.

A reader is a generator. It yields where it needs letters that have not come, and goes on when there are more or the
text has ended. So it is written as if the text were whole, and what it finds cannot depend on how the text was cut.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from shared.text.languages.mark_search import MarkSearch

T = TypeVar("T")
Waiting = Generator[None, None, T]  # a reader that returns a T
Show = Callable[[str], None]

BLANKS = " \t\r\n"
_WORD = re.compile(r"[\w.+-]+")


class GrowingText:
    """The text so far, and the place up to which it was read."""

    __slots__ = ("at", "ended", "text")

    def __init__(self, text: str = "", ended: bool = False) -> None:
        self.text = text
        self.at = 0
        self.ended = ended  # nothing more comes

    def forget(self) -> None:
        """Drop what was read. Whoever may go back must not call it."""
        self.text, self.at = self.text[self.at :], 0

    def peek(self) -> Waiting[str]:
        """The next letter; "" at the end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def skip(self, letters: str = BLANKS) -> Waiting[str]:
        """Read all of these letters that come."""
        start = self.at
        while (letter := (yield from self.peek())) and letter in letters:
            self.at += 1
        return self.text[start : self.at]

    def take(self, *marks: str) -> Waiting[str]:
        """Read one of these marks, the longest that fits; "" reads nothing."""
        longest = max(map(len, marks))
        while True:
            rest = self.text[self.at : self.at + longest]
            if self.ended or not any(len(mark) > len(rest) and mark.startswith(rest) for mark in marks):
                found = max((mark for mark in marks if mark and rest.startswith(mark)), key=len, default="")
                self.at += len(found)
                return found
            yield

    def word(self) -> Waiting[str]:
        """Read a name or a number."""
        start = self.at
        while True:
            found = _WORD.match(self.text, self.at)
            if found is not None:
                self.at = found.end()
            if self.at < len(self.text) or self.ended:
                return self.text[start : self.at]
            yield

    def count(self, letters: int) -> Waiting[str]:
        """The next letters, so many if there are, without reading them."""
        while len(self.text) - self.at < letters and not self.ended:
            yield
        return self.text[self.at : self.at + letters]

    def until(self, search: MarkSearch, show: Show, whole: bool = False) -> Waiting[str]:
        """Read up to the first of some marks, which is returned and not read; "" at the end. What may be the beginning
        of a mark is not shown before more of it has come; with `whole` not even at the end."""
        while True:
            at, mark = search.first(self.text, self.at)
            hidden = 0 if mark or (self.ended and not whole) else search.ending(self.text, self.at)
            end = at if mark else len(self.text) - hidden
            if end > self.at:
                show(self.text[self.at : end])
            self.at = len(self.text) if self.ended and not mark else end
            if mark or self.ended:
                return mark
            yield


def finished(reader: Waiting[T]) -> T:
    """The result of a reader whose text has ended."""
    try:
        while True:
            next(reader)
    except StopIteration as end:
        result: T = end.value
        return result
