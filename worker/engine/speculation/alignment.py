"""Where a row is in a text that it goes along with, though not each of its ids is there. Pure.

A row that has drawn another id than the text says is taken to go on behind that id at once: one id stands in the place
of another. Where that fails, too, the row's end is looked for near the place, since ids may have been left out or put
in, and then anywhere. While the text says what the row draws nothing is looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from worker.engine.speculation.lookup import (
    BREAK,
    NOTHING,
    PAST_END,
    Guess,
    History,
    Ids,
    Text,
    goes_on,
    goes_round,
    nearest,
    occurrences,
    said_at,
)

WINDOW = 16  # latest ids of a row, of which it is known whether the text says them
HELD = 4  # of them, at least, for a row to go along where the text does not say the latest one
MISSES = 4  # latest ids that the text does not say, at most
AHEAD = 3  # ids that a row may leave out, by the first one behind them alone
NEAR = (8, 16)  # ids before and behind a place that was missed twice: there one id that is found says enough
SURE = 2  # ids that a row's end must have elsewhere for the row to leave a place that it has missed


class End(NamedTuple):
    """Of a row that is to go on."""

    ids: Sequence[int]  # as many as are looked for, at most
    least: int  # that are to be found


class Alignment:
    """Of one row, with one text."""

    def __init__(self, ids: Ids, places: Sequence[int], matched: int) -> None:
        """`places`: of what may come next, which so many ids lie before as they do in the row."""
        self.ids = ids
        self.places = list(places)
        self._held = _ones(matched)  # a bit for each of the latest ids, of the last one the lowest

    @property
    def held(self) -> int:
        """The latest ids that the text says."""
        return self._held.bit_count()

    @property
    def misses(self) -> int:
        """The latest ids in a row that it does not."""
        return (self._held & -self._held).bit_length() - 1 if self._held else WINDOW

    def is_kept(self, least: int) -> bool:
        """Whether the row goes along, by so many ids at least."""
        enough = max(HELD, least) if self.misses else least
        return bool(self.places) and self.misses <= MISSES and self.held >= enough

    def follow(self, ids: Sequence[int]) -> None:
        """The row has gone on with these."""
        said = said_at(self.ids, self.places, len(ids))
        if said and said.count(list(ids)) == len(said):  # quickly, since that is so most of the time
            self._held = (self._held << len(ids) | _ones(len(ids))) & _ones(WINDOW)
            self.places = [place + len(ids) for place in self.places]
            return
        if len(said) == 1:
            self._follow_one(ids, said[0])
            return
        goes_along = list(zip(self.places, said, strict=True))
        for at, id_ in enumerate(ids):
            same = [each for each in goes_along if each[1][at] == id_]
            self._held = (self._held << 1 | bool(same)) & _ones(WINDOW)
            goes_along = same or [each for each in goes_along if each[1][at] not in (BREAK, PAST_END)]
        self.places = [place + len(ids) for place, _ in goes_along]

    def _follow_one(self, ids: Sequence[int], said: Sequence[int]) -> None:
        held, is_there = self._held, True
        for id_, other in zip(ids, said, strict=True):
            is_there = is_there and other >= 0
            held = held << 1 | (is_there and id_ == other)
        self._held = held & _ones(WINDOW)
        self.places = [self.places[0] + len(ids)] if is_there else []

    def find_near(self, end: Sequence[int]) -> int:
        """Go to where the text says what the row has drawn in place of what it missed; how many ids say so."""
        at = self.places[-1]
        low, high = (at, at + AHEAD) if self.misses == 1 else (max(0, at - NEAR[0]), at + NEAR[1])
        place, matched = nearest(self.ids[low : min(high, len(self.ids) - 1)].tolist(), end, at - low, WINDOW)
        if matched:
            self.places = [low + place]
            self._held |= _ones(matched)
        return matched


def _ones(count: int) -> int:
    return _ONES[min(WINDOW, count)]


_ONES = [(1 << count) - 1 for count in range(WINDOW + 1)]


class Course:
    """How a row goes along with one text, or with those that take its place by and by."""

    def __init__(self, *, is_own: bool = False) -> None:
        """`is_own`: the text is the row's own, which grows; of equal places there the latest one counts."""
        self._is_own = is_own
        self._now: Alignment | None = None

    def begin(self, ids: Ids, place: int) -> None:
        """The row goes on there for sure."""
        self._now = Alignment(ids, [place], WINDOW)

    def follow(self, ids: Sequence[int], own: Ids) -> None:
        """The row has gone on with these; `own`: its own text, which says them already."""
        if len(ids) > WINDOW:
            self._now = None  # to look for its place takes less time than to follow that far
        if self._now is None:
            return
        if self._is_own:
            self._now.ids = own  # a text of a short period has not said all of them before
        self._now.follow(ids)

    def is_along(self, least: int) -> bool:
        """Whether the row goes along now, by so many ids at least."""
        return self._now is not None and self._now.is_kept(least)

    def draft(self, text: Text | History, span: slice, end: End, count: int) -> Guess:
        """At most `count` ids that the row goes on with by such a text; a place is looked for in that span of it."""
        now, ids = self._now, text.ids
        if now is not None and self._is_own:
            now.ids = ids
        sure = 0
        if now is not None and now.is_kept(end.least):
            if not now.misses and now.ids is ids:
                return self._said(now, count)
            sure = max(SURE - 1, now.find_near(end.ids)) if now.misses else now.held
        if sure < len(end.ids) and text.runs(end.least).may_have(end.ids):
            places, matched = occurrences(ids[span][:-1], end.ids, max(end.least, sure + 1), len(end.ids))
            if matched:
                low, _, _ = span.indices(len(ids))
                chosen = places[-1:] if self._is_own else places
                now = self._now = Alignment(ids, (chosen + low).tolist(), matched)
        return self._said(now, count) if now is not None and self.is_along(end.least) else NOTHING

    def _said(self, now: Alignment, count: int) -> Guess:
        # What is found for sure elsewhere counts for more than a place that was just missed.
        matched = SURE - 1 if now.misses else now.held
        return (goes_round if self._is_own else goes_on)(now.ids, now.places, matched, count)
