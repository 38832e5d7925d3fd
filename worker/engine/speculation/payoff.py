"""Whether drafts pay: how likely they are accepted, and what steps of each width take. Pure.

A step of `rows` rows brings a token of each, and of a row whose drafts are accepted with chance p up to
`p + p^2 + ... + p^k` more. It pays when it brings more tokens per second than a step without drafts, and when no row
gets its own much later for it: one without drafts, or whose drafts fail, waits for the wider step, too. So both kinds
of steps are timed as they come, and each is taken again now and then, since contexts grow and machines get busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

RECENT = 0.07  # weight of the latest drafted token in a row's chance; the first ones weigh more
SHARED_RECENT = 0.02  # and in that of all rows
FEW = 2.0  # drafted tokens, as many as what a row begins with counts for
FIRST_CHANCE = 0.5  # before anything is known
HOPE = 0.7  # what a row that has paused is tried with
UNLIKELY = 0.05  # a place in a draft that is reached more seldom is not worth it
LIKELY = 0.34  # a row whose drafts fail pauses only below that
LONGEST_PAUSE = 6  # times that it doubles: 64 steps
SLOWED = 1.08  # times what a step without drafts takes: so much later a row may get its tokens for others' drafts
PACE_RECENT = 0.2  # weight of the latest step in a row's pace
MARGIN = 1.03  # by which drafts must be better
SAMPLES = 24  # latest times of one kind of step, of which the lower quartile counts: more than a busy moment leaves
ENOUGH = 5  # of them
LEAST_SAMPLES = 2  # of which the lower one counts: a GPU compiles kernels in the first step of its kind, for seconds
STALE = 500  # steps after which a time is taken again; sooner where fewer have been taken
PLAIN_STALE = 150  # of a step without drafts, which costs little: an old one would let drafts go on at a loss


class Chance:
    """How likely the next token of a draft is accepted."""

    def __init__(self, value: float = FIRST_CHANCE) -> None:
        self.known = value
        self.pace = 1.0  # tokens of a step that checks drafts, lately
        self._steps = 1  # of these
        self._seen = FEW
        self._failures = 0
        self._hopes = False

    @property
    def value(self) -> float:
        """What is known, or hoped of a row that has paused."""
        return max(HOPE, self.known) if self._hopes else self.known

    def learn(self, drafted: int, accepted: int, recent: float = RECENT) -> None:
        """One draft was tried."""
        known, seen = self.known, self._seen
        for at in range(min(accepted + 1, drafted)):
            seen += 1
            known += max(recent, 1 / seen) * ((at < accepted) - known)
        self.known, self._seen = known, seen
        self._failures = 0 if accepted else self._failures + 1

    def hope(self) -> None:
        """There is a text to draft from: until a step has checked drafts, one is taken to bring more than one token."""
        if self._steps == 1:
            self.pace = 1 + self.value

    def moved(self, tokens: int) -> None:
        """A step that checked drafts, maybe of other rows, has brought so many."""
        self._steps += 1
        self.pace += max(PACE_RECENT, 1 / self._steps) * (tokens - self.pace)

    def pauses(self, step: int) -> bool:
        """Whether it asks for no step that checks drafts; a row whose drafts keep failing does so ever more seldom.

        Rows try again in the same steps: one of many would not pay for the wider step, all together may.
        """
        is_poor = self.known < LIKELY and self._failures > 0
        self._hopes = is_poor and step % pause(self._failures) == 0
        return is_poor and not self._hopes

    def length(self, most: int) -> int:
        """How long a draft is worth it."""
        length, reached = 0, 1.0
        while length < most and reached * self.known >= UNLIKELY:
            reached *= self.known
            length += 1
        return max(1, length)


def pause(failures: int) -> int:
    """Steps from one try to the next after so many have failed in a row."""
    return 1 << min(LONGEST_PAUSE, failures)


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
        if len(times) < LEAST_SAMPLES:
            return None
        # Few times may be those of busy moments: they are taken again soon.
        stale = (STALE if width > 1 else PLAIN_STALE) * min(1, len(times) / ENOUGH)
        return None if self._steps - self._taken_at[key] >= stale else sorted(times)[(len(times) + 1) // 4]

    def likely(self, rows: int, width: int) -> float | None:
        """Seconds, as those of narrower and of wider steps tell; None when nothing does.

        A step that checks drafts may take more than one without by itself, and more for each token of a draft: on a GPU
        it is the former that counts, in a large batch on a CPU the latter. So after one token two are tried where they
        pay if the second one takes nothing, and then both are known.
        """
        if (seconds := self.known(rows, width)) is not None:
            return seconds
        plain = self.known(rows, 1)
        if plain is None:
            return None
        bucket, _ = _key(rows, 1)
        widths = sorted(each for of, each in self._times if of == bucket and each > 1)
        wide = [(each, took) for each in widths if (took := self.known(rows, each)) is not None]
        below = [(1, plain), *[each for each in wide if each[0] < width]]
        above = next((each for each in wide if each[0] > width), None)
        if above is not None:
            return _on_line(below[-1], above, width)
        if len(below) <= 2 and width == below[-1][0] + 1:
            return below[-1][1]  # it may be so: who does not try does not know
        return None if len(below) == 1 else max(below[-1][1], _on_line(below[-2], below[-1], width))


def _on_line(one: tuple[int, float], other: tuple[int, float], width: int) -> float:
    return one[1] + (other[1] - one[1]) * (width - one[0]) / (other[0] - one[0])


def _key(rows: int, width: int) -> tuple[int, int]:
    """Batches of 5 to 8 rows are taken for alike, and so on: rows come and go, and a time must be known soon."""
    return 1 << (rows - 1).bit_length(), width


@dataclass(frozen=True)
class Try:
    """One row in a step that may check drafts."""

    chance: float
    length: int  # of its draft; 0: it has none
    pace: float

    def tokens(self, longest: int) -> float:
        """That it is likely to get, when no draft is longer than that."""
        total = reached = 1.0
        for _ in range(min(self.length, longest)):
            reached *= self.chance
            total += reached
        return total


def best_length(times: StepTimes, rows: Sequence[Try], *, alone: bool) -> int:
    """How long the drafts of this step should be at most; 0: none pays. `alone`: no prompt waits."""
    plain = times.known(len(rows), 1)
    if plain is None:
        return 0
    best, best_rate = 0, MARGIN * len(rows) / plain
    for longest in range(1, max(row.length for row in rows) + 1):
        seconds = times.likely(len(rows), longest + 1)
        if seconds is None:
            break
        tokens = [row.tokens(longest) for row in rows]
        slowest = min(max(each, row.pace) for each, row in zip(tokens, rows, strict=True)) if alone else 1.0
        if sum(tokens) / seconds > best_rate and seconds <= SLOWED * slowest * plain:
            best, best_rate = longest, sum(tokens) / seconds
    return best
