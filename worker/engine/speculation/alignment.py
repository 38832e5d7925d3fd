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
STEADY = 8  # of the latest ids: a row that goes along by so many and misses one is not looked for in all of the text


class End(NamedTuple):
    """The end of a row that is to go on."""

    ids: Sequence[int]  # as many as are looked for, at most
    least: int  # that are to be found


class Alignment:
    """Where one row is in one text."""

    def __init__(self, ids: Ids, places: Sequence[int], matched: int) -> None:
        """`places`: of what may come next, which so many ids lie before as they do in the row."""
        self.ids = ids
        self.places = list(places)
        self._keep(_ones(matched))

    def _keep(self, bits: int) -> None:
        """Which of the latest ids the text says: a bit for each, of the last one the lowest."""
        self._bits = bits
        self.held = bits.bit_count()
        self.misses = (bits & -bits).bit_length() - 1 if bits else WINDOW  # the latest ids in a row that it does not

    def is_kept(self, least: int) -> bool:
        enough = HELD if self.misses and least < HELD else least
        return bool(self.places) and self.misses <= MISSES and self.held >= enough

    @property
    def is_steady(self) -> bool:
        """True if the row most likely goes on here: the text has said the latest ids, or most but the last one or two.

        That two differ at once says little only where others do, too.
        """
        missed = WINDOW - self.held
        return not self.misses or (self.held >= STEADY and (self.misses == 1 or 2 == self.misses < missed))

    def follow(self, ids: list[int]) -> None:
        said = said_at(self.ids, self.places, len(ids))
        if len(said) == 1:
            held, goes_on = _held(ids, said[0]), min(said[0]) >= 0
            places = [self.places[0] + len(ids)] if goes_on else []
        else:
            held, places = self._held_by_some(ids, said)
        self._keep((self._bits << len(ids) | held) & _ones(WINDOW))
        self.places = places

    def _held_by_some(self, ids: list[int], said: list[list[int]]) -> tuple[int, list[int]]:
        """Which of these some place says, and the places that go on: those that say an id, wherever some do."""
        held, goes_along = 0, list(zip(self.places, said, strict=True))
        for at, id_ in enumerate(ids):
            same = [each for each in goes_along if each[1][at] == id_]
            held = held << 1 | bool(same)
            goes_along = same or [each for each in goes_along if each[1][at] not in (BREAK, PAST_END)]
        return held, [place + len(ids) for place, _ in goes_along]

    def find_near(self, end: Sequence[int]) -> int:
        """Go to where the text says what the row has drawn in place of what it missed; how many ids say so."""
        at = self.places[-1]
        low, high = (at, at + AHEAD) if self.misses == 1 else (max(0, at - NEAR[0]), at + NEAR[1])
        near = self.ids[low : min(high, len(self.ids) - 1)].tolist()
        if end[-1] not in near:
            return 0
        place, matched = nearest(near, end, at - low, WINDOW)
        self.places = [low + place]
        self._keep(self._bits | _ones(matched))
        return matched


def _held(ids: list[int], said: list[int]) -> int:
    """Which of these are said: a bit for each."""
    if ids == said:
        return _ones(len(ids))
    if ids[:-1] == said[:-1]:  # a draft that has held, and what was drawn behind it
        return _ones(len(ids)) - 1
    held = 0
    for id_, other in zip(ids, said, strict=True):
        held = held << 1 | (id_ == other)
    return held


def _ones(count: int) -> int:
    return (1 << min(WINDOW, count)) - 1


class Course:
    """How a row goes along with one text, or with those that take its place by and by."""

    def __init__(self, *, is_own: bool = False) -> None:
        """`is_own`: the text is the row's own, which grows; of equal places there the latest one counts."""
        self._is_own = is_own
        self._now: Alignment | None = None
        self.has_slipped = False  # in the latest draft: the row most likely goes on behind the id that was not said

    def begin(self, ids: Ids, place: int) -> None:
        self._now = Alignment(ids, [place], WINDOW)

    def follow(self, ids: list[int], row: Text) -> None:
        """The row has gone on with these; `row`: what it has read and written, which says them already."""
        if self._now is None:
            return
        if len(ids) > WINDOW:
            self._now = None  # to look for its place takes less time than to follow that far
            return
        if self._is_own:
            self._now.ids = row.ids  # a text of a short period has not said all of them before
        self._now.follow(ids)
        if self._is_own and self._now.misses > MISSES:
            self._now = None  # one of others may say again, later, what the row goes on with

    def is_along(self, least: int) -> bool:
        return self._now is not None and self._now.is_kept(least)

    def draft(self, text: Text, span: slice, end: End, count: int) -> Guess:
        """At most `count` ids that the row goes on with by such a text; a place is looked for in that span of it."""
        now, least = self._now, end.least
        if now is not None and self._is_own:
            now.ids = text.ids
        sure, self.has_slipped = 0, False
        if now is not None and now.is_kept(least):
            is_steady = now.is_steady
            sure = max(SURE - 1, now.find_near(end.ids)) if now.misses else now.held
            if is_steady and (self._is_own or now.ids is text.ids):
                guess = self._said(now, count)
                self.has_slipped = now.misses > 0 and bool(guess.ids)
                return guess
        if sure < len(end.ids) and text.may_have(end.ids, least):
            ids = text.ids
            places, matched = occurrences(ids[span][:-1], end.ids, max(least, sure + 1), len(end.ids))
            if matched:
                low, _, _ = span.indices(len(ids))
                chosen = places[-1:] if self._is_own else places
                now = self._now = Alignment(ids, (chosen + low).tolist(), matched)
        return self._said(now, count) if now is not None and now.is_kept(least) else NOTHING

    def _said(self, now: Alignment, count: int) -> Guess:
        # What is found for sure elsewhere counts for more than a place that was just missed.
        matched = SURE - 1 if now.misses else now.held
        return (goes_round if self._is_own else goes_on)(now.ids, now.places, matched, count)
