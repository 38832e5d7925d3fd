"""Where a text may go on as it did before: the longest end of it that occurs earlier, and what followed there. Pure.

Ids are compared in arrays, by numpy: 16,384 of them take about 10 us, without an index of every row's places. Before
that `Runs` says, in less than 1 us, of most ends that they do not occur at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

BREAK = -1  # between two texts: no id, so nothing is matched or drafted across it
PAST_END = -2  # of all of them
VOTERS = 32  # places, the latest ones, that say what comes next
BEGINNING = 64  # ids of a text that are counted from its first one
END = 64  # of a row's ids that are at hand without an array
AT_ONCE = 48  # ids of a row that are looked through one by one, at most
OWN_VOTES = 2  # texts that a row's own chance counts for beside theirs
_BITS = 16
RUNS_BYTES = (1 << _BITS) // 8
_MASK = (1 << 64) - 1
_FACTOR, _GOLDEN = 0x100000001B3, 0x9E3779B97F4A7C15
_NOWHERE: Ids = np.array([], np.int32)


class Runs:
    """Which runs of so many ids a text goes on behind; of some others it seems so, too."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._marks = bytearray(RUNS_BYTES)  # a bit each

    def add(self, ids: Ids) -> None:
        """All runs in these, but for the one at the end."""
        count = len(ids) - self._length
        if count <= 0:
            return
        hashes, wide = np.zeros(count, np.uint64), ids.astype(np.uint64)
        for at in range(self._length):
            hashes = hashes * np.uint64(_FACTOR) + wide[at : at + count]
        marked = np.zeros(1 << _BITS, np.bool_)
        marked[(hashes * np.uint64(_GOLDEN)) >> np.uint64(64 - _BITS)] = True
        marks = np.frombuffer(self._marks, np.uint8)
        marks |= np.packbits(marked, bitorder="little")

    def may_have(self, ids: Sequence[int]) -> bool:
        """True if the run at the end of these may be one of them."""
        if len(ids) < self._length:
            return False
        place = _place(ids[-self._length :])
        return self._marks[place >> 3] >> (place & 7) & 1 == 1


def _place(run: Sequence[int]) -> int:
    hashed = 0
    for id_ in run:
        hashed = hashed * _FACTOR + id_  # as long as it becomes: runs are short
    return ((hashed * _GOLDEN) & _MASK) >> (64 - _BITS)


class Text:
    """Ids to draft from; more may be added at the end, as to a row's own.

    They are copied into an array when somebody looks through it, which most steps do not. Runs are marked only when
    they are asked for, since a row that goes along with a text asks for none.
    """

    def __init__(self, ids: Sequence[int] | Ids) -> None:
        self._ids: Ids = np.asarray(ids, np.int32)
        self._size = self._copied = len(ids)
        self._end: list[int] = self._ids[-END:].tolist()  # the latest ids, all that are not copied yet among them
        self._runs: dict[int, Runs] = {}
        self._marked: dict[int, int] = {}  # of these, ids the runs before which are marked

    def __len__(self) -> int:
        return self._size

    def add(self, ids: Sequence[int]) -> None:
        self._end += ids
        self._size += len(ids)
        if len(self._end) > 2 * END:
            self._copy()
            del self._end[:-END]

    def _copy(self) -> None:
        new, size = self._size - self._copied, self._size
        if size > len(self._ids):
            self._ids = np.concatenate([self._ids[: self._copied], np.empty(max(64, size), np.int32)])
        if new:
            self._ids[self._copied : size] = self._end[-new:]
            self._copied = size

    def may_have(self, end: Sequence[int], length: int) -> bool:
        """True if it may go on behind the last so many of these, as it does not behind its own end.

        Where there are many new ids their runs are marked at once; among a few the last one of `end` is looked for.
        """
        if length not in self._runs:
            self._runs[length], self._marked[length] = Runs(length), 0
        new = self._size - self._marked[length]
        if new > AT_ONCE:
            self._runs[length].add(self.ids[max(0, self._marked[length] - length) :])
            self._marked[length], new = self._size, 0
        return end[-1] in self.end(new + 1)[:-1] or self._runs[length].may_have(end)

    @property
    def ids(self) -> Ids:
        """All ids so far: the same array for as long as none is added, and else a view."""
        if self._copied < self._size:
            self._copy()
        return self._ids if self._size == len(self._ids) else self._ids[: self._size]

    def end(self, count: int) -> list[int]:
        if count <= len(self._end) or self._size == len(self._end):
            return self._end[-count:] if count else []
        latest: list[int] = self.ids[max(0, self._size - count) :].tolist()
        return latest


class Guess(NamedTuple):
    """Ids that a text may go on with."""

    ids: list[int]
    matched: int = 0  # ids of its end by which it was found; 0: nowhere
    votes: Sequence[tuple[int, int]] = ()  # for each id, by texts that say it, and by all that go on there

    def agreed(self, chance: float, least: float) -> tuple[int, float]:
        """How many of its ids a row reaches with a chance of at least this, and the chance of one on average.

        `chance` is that of a row's drafts lately; it counts beside what texts say, of which there may be few.
        """
        reached, length = 1.0, 0
        for own, all_ in self.votes:
            share = (own + OWN_VOTES * chance) / (all_ + OWN_VOTES)
            if reached * share < least:
                break
            reached, length = reached * share, length + 1
        return length, reached ** (1 / max(1, length))


NOTHING = Guess([])


class Beginnings:
    """The first ids of texts, one row of a table for each: found by one comparison, without a search."""

    def __init__(self, texts: Sequence[Ids]) -> None:
        """The latest is the last."""
        self._table: Ids = np.full((len(texts), BEGINNING + 1), BREAK, np.int32)  # behind the last column, too
        for row, ids in zip(self._table, texts, strict=True):
            begun = ids[:BEGINNING]
            row[: len(begun)] = begun

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def draft(self, written: Sequence[int], count: int) -> Guess:
        """At most `count` ids that texts which begin so go on with: at each place what most say, then the latest."""
        matched = len(written)
        rows = np.flatnonzero((self._table[:, :matched] == np.array(written, np.int32)).all(axis=1))
        return goes_on(self._table.ravel(), (rows * (BEGINNING + 1) + matched).tolist(), matched, count)


def occurrences(text: Ids, end: Sequence[int], least: int, most: int) -> tuple[Ids, int]:
    """Where `text` goes on after the longest end of `end` that occurs in it, in order; and how long that is.

    At least `least` ids must match, and no more than `most` are compared; none and 0: nowhere.
    """
    if not len(end):
        return _NOWHERE, 0
    places = np.flatnonzero(text == end[-1])
    matched = 1 if places.size else 0
    while 0 < matched < min(most, len(end)):
        longer = places[places >= matched]
        longer = longer[text[longer - matched] == end[-1 - matched]]
        if not longer.size:
            break
        places, matched = longer, matched + 1
    return (places[-VOTERS:].astype(np.int32) + 1, matched) if matched >= max(1, least) else (_NOWHERE, 0)


def nearest(text: Sequence[int], end: Sequence[int], to: int, most: int) -> tuple[int, int]:
    """As `occurrences` has it, of a few ids: of such places that which is nearest to `to`; (0, 0): nowhere."""
    found, longest = 0, 0
    for at, id_ in enumerate(text, 1):
        if id_ != end[-1]:
            continue
        matched = 1
        while matched < min(most, len(end), at) and text[at - 1 - matched] == end[-1 - matched]:
            matched += 1
        if matched > longest or (matched == longest and abs(at - to) < abs(found - to)):
            found, longest = at, matched
    return found, longest


def goes_round(text: Ids, places: Sequence[int], matched: int, count: int) -> Guess:
    """`count` ids that a text goes on with as it did from the last of these places on.

    One that repeats itself is expected to go on in the same period.
    """
    start = places[-1]
    said = text[start : start + count].tolist()
    return Guess([said[at % len(said)] for at in range(count)], matched)


def said_at(source: Ids, places: Sequence[int], count: int) -> list[list[int]]:
    """The next `count` ids at each of these places; PAST_END behind the last one."""
    said = [source[place : place + count].tolist() for place in places]
    for ids in said:
        if len(ids) < count:
            ids += [PAST_END] * (count - len(ids))
    return said


def goes_on(source: Ids, places: Sequence[int], matched: int, count: int) -> Guess:
    """At most `count` ids that a text says from these places on: the next id is the one that most of them say.

    Of equally many the latest place counts. Nothing goes on behind a BREAK.
    """
    if len(places) == 1:  # quickly, since that is so most of the time
        ids: list[int] = source[places[0] : places[0] + count].tolist()
        if ids and min(ids) < 0:
            del ids[ids.index(BREAK) :]
        return Guess(ids, matched, [(1, 1)] * len(ids))
    said = said_at(source, places, count)
    if said and min(said[-1]) >= 0 and said.count(said[-1]) == len(said):  # and so is this
        return Guess(said[-1], matched, [(len(said), len(said))] * count)
    draft: list[int] = []
    votes: list[tuple[int, int]] = []
    for at in range(count):
        nexts = Counter([ids[at] for ids in reversed(said)])  # of equal ones `max` takes the first
        going_on = len(said) - nexts.pop(PAST_END, 0)
        nexts.pop(BREAK, None)
        if not nexts:
            break
        id_ = max(nexts, key=nexts.__getitem__)
        draft.append(id_)
        votes.append((nexts[id_], going_on))
        if nexts[id_] < len(said):
            said = [ids for ids in said if ids[at] == id_]
        if len(said) == 1:
            ends = next((end for end in range(at + 1, count) if said[0][end] < 0), count)
            draft += said[0][at + 1 : ends]
            votes += [(1, 1)] * (ends - at - 1)
            break
    return Guess(draft, matched, votes)
