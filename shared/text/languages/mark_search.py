"""Finds marks in a text that grows, each of them whole or begun."""

import re
from functools import lru_cache


class MarkSearch:
    """Looks for the first of some marks; make it with `search_for`."""

    __slots__ = ("_begun", "_whole")

    def __init__(self, marks: tuple[str, ...]) -> None:
        marks = tuple(mark for mark in marks if mark)
        begun = sorted({mark[:length] for mark in marks for length in range(1, len(mark))}, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, marks))) if marks else None
        self._begun = re.compile(f"(?:{'|'.join(map(re.escape, begun))})\\Z") if begun else None

    def first(self, text: str, begin: int = 0) -> tuple[int, str]:
        """Where the first mark from `begin` on is, and which it is; (-1, "") for none."""
        found = self._whole.search(text, begin) if self._whole is not None else None
        return (-1, "") if found is None else (found.start(), found[0])

    def ending(self, text: str, begin: int = 0) -> int:
        """Length of the longest end of `text` from `begin` on that may be the beginning of a mark."""
        found = self._begun.search(text, begin) if self._begun is not None else None
        return 0 if found is None else len(text) - found.start()


@lru_cache(maxsize=256)
def search_for(*marks: str) -> MarkSearch:
    """The search for these marks. Of two at the same place, the one that is named first is found."""
    return MarkSearch(marks)
