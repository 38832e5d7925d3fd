"""Whether drafts pay: how likely they are accepted, and what steps of each width take. Pure.

A step of `rows` rows brings a token of each, and of a row whose drafts are accepted with chance p up to
`p + p^2 + ... + p^k` more. It pays when it brings more tokens per second than a step without drafts. So both kinds of
steps are timed as they come, and each is taken again now and then, since contexts grow and machines get busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

RECENT = 0.25  # weight of the latest drafted token in a row's chance
SHARED_RECENT = 0.1  # and in that of all rows
FIRST_CHANCE = 0.5  # before anything is known
UNLIKELY = 0.1  # a place in a draft that is reached more seldom is not worth it
LONGEST_PAUSE = 64  # steps, of a row whose drafts keep failing
MARGIN = 1.03  # by which drafts must be better
SAMPLES = 5  # latest times of one kind of step
STALE = 500  # steps after which a time is taken again; sooner where fewer have been taken


class Chance:
    """How likely the next token of a draft is accepted."""

    def __init__(self, value: float = FIRST_CHANCE) -> None:
        self.value = value
        self._pause = self._failures = 0

    def learn(self, drafted: int, accepted: int, recent: float = RECENT) -> None:
        """One draft was tried."""
        for at in range(min(accepted + 1, drafted)):
            self.value += recent * ((at < accepted) - self.value)
        self._failures = 0 if accepted else self._failures + 1
        self._pause = min(LONGEST_PAUSE, 1 << self._failures) if self._failures > 1 else 0

    def pauses(self) -> bool:
        """Whether this step goes without a draft; a row whose drafts keep failing gets one ever more seldom."""
        self._pause = max(0, self._pause - 1)
        return self._pause > 0

    def length(self, most: int) -> int:
        """How long a draft is worth it."""
        length, reached = 0, 1.0
        while length < most and reached * self.value >= UNLIKELY:
            reached *= self.value
            length += 1
        return max(1, length)


class StepTimes:
    """What steps of so many rows and such a width have taken lately."""

    def __init__(self) -> None:
        self._steps = 0
        self._times: dict[tuple[int, int], deque[float]] = {}
        self._taken_at: dict[tuple[int, int], int] = {}

    def took(self, rows: int, width: int, seconds: float) -> None:
        """One step."""
        self._steps += 1
        key = _key(rows, width)
        self._times.setdefault(key, deque(maxlen=SAMPLES)).append(seconds)
        self._taken_at[key] = self._steps

    def known(self, rows: int, width: int) -> float | None:
        """Seconds; None when nothing is known, or what is known is old."""
        key = _key(rows, width)
        times = self._times.get(key, ())
        # One time alone may be that of a busy moment: it is taken again soon.
        if not times or self._steps - self._taken_at[key] >= STALE * (len(times) / SAMPLES) ** 2:
            return None
        return median(times)

    def likely(self, rows: int, width: int) -> float | None:
        """Seconds, as those of narrower and of wider steps tell; None when a step without drafts is not known."""
        if (seconds := self.known(rows, width)) is not None:
            return seconds
        plain = self.known(rows, 1)
        if plain is None:
            return None
        known = [(each, self.known(rows, each)) for (of, each) in self._times if of == _key(rows, 1)[0]]
        below = max(((each, took) for each, took in known if took is not None and each < width), default=(1, plain))
        above = min(((each, took) for each, took in known if took is not None and each > width), default=None)
        if above is None:
            return below[1]  # it may be so: who does not try does not know
        return below[1] + (above[1] - below[1]) * (width - below[0]) / (above[0] - below[0])


def _key(rows: int, width: int) -> tuple[int, int]:
    """Batches of 5 to 8 rows are taken for alike, and so on: rows come and go, and a time must be known soon."""
    return 1 << (rows - 1).bit_length(), width


def expected(drafts: Iterable[tuple[float, int]], longest: int) -> float:
    """Tokens that drafts of such chances and lengths bring, when none is longer than that."""
    total = 0.0
    for chance, length in drafts:
        reached = 1.0
        for _ in range(min(length, longest)):
            reached *= chance
            total += reached
    return total


def best_length(times: StepTimes, rows: int, drafts: Sequence[tuple[float, int]]) -> int:
    """How long the drafts of this step should be at most, chances and lengths of which are given; 0: none pays."""
    plain = times.known(rows, 1)
    if plain is None:
        return 0
    best, best_rate = 0, MARGIN * rows / plain
    for longest in range(1, max(length for _, length in drafts) + 1):
        seconds = times.likely(rows, longest + 1) or plain
        rate = (rows + expected(drafts, longest)) / seconds
        if rate > best_rate:
            best, best_rate = longest, rate
    return best
