"""Where a text may go on as it did before: the longest end of it that occurs earlier, and what followed there. Pure.

Ids are compared in arrays, by numpy: 16,384 of them take about 10 us, without an index that would have to be built and
kept for every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

BREAK = -1  # between two texts: no id, so nothing is matched or drafted across it


class History:
    """Ids to which more are added at the end."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids: Ids = np.empty(max(64, 2 * len(ids)), np.int32)
        self._size = 0
        self.add(ids)

    def __len__(self) -> int:
        return self._size

    def add(self, ids: Sequence[int]) -> None:
        """At the end."""
        size = self._size + len(ids)
        if size > len(self._ids):
            self._ids = np.concatenate([self._ids[: self._size], np.empty(size, np.int32)])
        self._ids[self._size : size] = ids
        self._size = size

    def latest(self, count: int) -> Ids:
        """The last ones, at most `count`; a view."""
        return self._ids[max(0, self._size - count) : self._size]


def occurrence(text: Ids, end: Ids, least: int, most: int) -> tuple[int, int]:
    """Where `text` goes on after the longest end of `end` that occurs in it, the last time; and how long that is.

    At least `least` ids must match, and no more than `most` are compared; (0, 0): nowhere.
    """
    if not len(end):
        return 0, 0
    places = np.flatnonzero(text == end[-1])
    matched = 1 if places.size else 0
    while 0 < matched < min(most, len(end)):
        longer = places[places >= matched]
        longer = longer[text[longer - matched] == end[-1 - matched]]
        if not longer.size:
            break
        places, matched = longer, matched + 1
    return (int(places[-1]) + 1, matched) if matched >= max(1, least) else (0, 0)


def own_draft(text: Ids, count: int, least: int, most: int) -> tuple[list[int], int]:
    """At most `count` ids that a text may go on with by what it says itself; and how many ids of its end matched.

    A text that repeats itself is expected to go on in the same period.
    """
    start, matched = occurrence(text[:-1], text[-most:], least, most)
    if not matched:
        return [], 0
    period = len(text) - start
    return _up_to_break(text[start + at % period] for at in range(count)), matched


def draft_from(source: Ids, text: Ids, count: int, least: int, most: int) -> tuple[list[int], int]:
    """Likewise, by what another text says."""
    start, matched = occurrence(source[:-1], text[-most:], least, most)
    return (_up_to_break(source[start : start + count]), matched) if matched else ([], 0)


def _up_to_break(ids: Iterable[np.int32]) -> list[int]:
    draft: list[int] = []
    for id_ in ids:
        if id_ == BREAK:
            break
        draft.append(int(id_))
    return draft
