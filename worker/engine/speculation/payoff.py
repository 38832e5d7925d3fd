"""Whether drafts pay: how likely they are accepted, and what steps of each width take. Pure.

A step of `rows` rows brings a token of each, and of a row whose drafts are accepted with chance p up to
`p + p^2 + ... + p^k` more. It pays when it brings more tokens per second than a step without drafts, and when no row
gets its own much later for it: one without drafts, or whose drafts fail, waits for the wider step, too. Rows of batches
and jobs may: of these only the sum counts. So both kinds of steps are timed as they come, and each is taken again now
and then, since contexts grow and machines get busy.

That is a guess, and to make it takes time. So it is kept account of what drafts have brought and what they and looking
for them have cost (`Account`), where rows have texts to draft from and where they have none. What is lost for good is a
hundredth of the time and three steps of each, of many rows on a CPU two hundredths, and nothing in advance. A loss may
mean that all steps take longer than they did, on a machine that others use: it is believed once steps without drafts
have been timed anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from statistics import median, median_low
from typing import NamedTuple

RECENT = 0.07  # weight of the latest drafted token in a row's chance; the first ones weigh more
SHARED_RECENT = 0.02  # and in that of all rows with a text to draft from, or of all without
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
DOUBTED = 4  # ... and sooner still if it is out of line: so many, twice as many for each time that has been taken
PLAIN_STALE = 150  # of a step without drafts, which costs little: an old one would let drafts go on at a loss
EARNED = 0.01  # of a step: what each one allows to lose
AT_FIRST = 3.0  # steps that may be lost before anything is known
AGAIN = 1.0  # steps that must have been earned, where all were lost, until there is another try: a few at once say more
FEW_ROWS = 8  # of which a CPU checks drafts at little more than it takes anyway
SAVED = 8.0  # steps that may be lost after drafts have paid
BUSY = 1.5  # times the median of a step that checks drafts: one that takes longer says something of the machine only
PLAIN_BUSY = 3.0  # and of one without, which may come with a prompt or with none
PLAIN_SAMPLES = 64  # latest ones
DOUBT = 2.0  # steps lost since drafts last paid: after that a step without is timed again
WAIT = 0.25  # of a step: what it costs at least to wait for what a step is fed, and then to check nothing
LONGEST_REST = 1 << LONGEST_PAUSE  # steps
TRUST = 1.2  # so much less than usual a step may bring by what is guessed of it, while drafts owe nothing


class Chance:
    """How likely the next token of a draft is accepted."""

    def __init__(self, value: float = FIRST_CHANCE) -> None:
        self.known = value
        self.pace = 1.0  # tokens of a step that checks drafts, lately
        self._steps = 1  # of these
        self._seen = FEW
        self._failures = int(value < LIKELY)  # of such rows before, or it would never be hoped for
        self._hopes = False

    @property
    def value(self) -> float:
        """What is known, or hoped of a row that has paused."""
        return max(HOPE, self.known) if self._hopes else self.known

    def learn(self, drafted: int, accepted: int, recent: float = RECENT) -> None:
        """One draft was tried."""
        known, seen = self.known, self._seen
        if seen * recent >= 1:  # each weighs as much as the next one
            known = 1 - (1 - known) * (1 - recent) ** accepted
            known *= 1.0 if accepted == drafted else 1 - recent
        else:
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
        if self.known**most >= UNLIKELY:
            return most
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
        self.beside: StepTimes | None = None  # of steps that take about as much more for drafts, though not as much
        self._steps = 0
        self._times: dict[tuple[int, int], deque[float]] = {}
        self._usual: dict[tuple[int, int], float] = {}  # of these, since they were asked for: many times in some steps
        self._taken_at: dict[tuple[int, int], int] = {}
        self._taken: dict[tuple[int, int], int] = {}  # how often, those included that are not remembered

    def took(self, rows: int, width: int, seconds: float, steps: int = 1) -> None:
        """One step, or so many on average: these count for some, of all that are remembered."""
        self._steps += steps
        key = _key(rows, width)
        times = self._times.setdefault(key, deque(maxlen=SAMPLES))
        if width > 1 and self._steps - self._taken_at.get(key, self._steps) >= STALE:
            old = self._usual_of(key, times)
            times.clear()
            times.append(old)  # for as much as a new one: the first check after a long time takes longer than others
        self._taken[key] = self._taken.get(key, 0) + min(steps, ENOUGH)
        times.extend([seconds] * min(steps, ENOUGH))
        self._usual.pop(key, None)
        self._taken_at[key] = self._steps

    def known(self, rows: int, width: int) -> float | None:
        """Seconds; None when nothing is known, or what is known is old."""
        key = _key(rows, width)
        if (taken := self._taken.get(key, 0)) < LEAST_SAMPLES:
            return None
        times = self._times[key]
        # Few times may be those of busy moments: they are taken again soon, and sooner if they look like it.
        stale = (STALE if width > 1 else PLAIN_STALE) * min(1, taken / ENOUGH)
        seconds, sooner = self._usual_of(key, times), DOUBTED << min(SAMPLES, taken)
        if width > 1 and sooner < stale and self._is_doubtful(rows, width, seconds):
            seconds, stale = sorted(times)[len(times) // 4], sooner  # of three the least: two may be of one moment
        return None if self._steps - self._taken_at[key] >= stale else seconds

    def _is_doubtful(self, rows: int, width: int, seconds: float) -> bool:
        """Whether that is much more than narrower steps let expect, so that busy moments may have been timed."""
        plain = self.usual(rows, 1)
        if plain is None:
            return False
        narrower = max((each for of, each in self._times if of == about(rows) and 1 < each < width), default=0)
        below = (narrower, self.usual(rows, narrower) or 0.0) if narrower else (2, 2 * plain)
        return seconds > BUSY * max(plain, _on_line((1, plain), below, width))

    def forget(self, rows: int) -> float:
        """What steps without drafts have taken, in seconds, since it may have changed; 0: nothing was known."""
        seconds = self.usual(rows, 1) or 0.0
        for each in (self._times, self._usual, self._taken):
            each.pop(_key(rows, 1), None)
        return seconds

    def _wide(self, rows: int) -> list[tuple[int, float]]:
        """Widths of steps that check drafts, and seconds, as far as they are known."""
        widths = sorted(each for of, each in self._times if of == about(rows) and each > 1)
        return [(each, took) for each in widths if (took := self.known(rows, each)) is not None]

    def usual(self, rows: int, width: int) -> float | None:
        """Seconds, however old or few; None when there are none."""
        key = _key(rows, width)
        times = self._times.get(key)
        return self._usual_of(key, times) if times else None

    def _usual_of(self, key: tuple[int, int], times: Collection[float]) -> float:
        if key not in self._usual:
            self._usual[key] = sorted(times)[(len(times) + 1) // 4]
        return self._usual[key]

    def likely(self, rows: int, width: int) -> float | None:
        """Seconds, as those of narrower and of wider steps tell; None when nothing does.

        A step that checks drafts may take more than one without by itself, and more for each token of a draft: on a GPU
        it is the former that counts, in a large batch on a CPU the latter. So after one token two are tried where they
        pay if the second one takes nothing, and then both are known. Old times are as good a guess: what once paid
        need not be tried in all lengths below it.
        """
        if (seconds := self.known(rows, width)) is not None:
            return seconds
        guesses = [each for each in (self._in_line(rows, width), self.usual(rows, width)) if each is not None]
        return min(guesses, default=None)

    def _in_line(self, rows: int, width: int) -> float | None:
        """Seconds with others' that are known."""
        plain = self.known(rows, 1)
        if plain is None:
            return None
        wide = self._wide(rows)
        if not wide and self.beside is not None and (theirs := self.beside.usual(rows, 1)) is not None:
            wide = [(each, plain + took - theirs) for each, took in self.beside._wide(rows)]
        below = [(1, plain), *[each for each in wide if each[0] < width]]
        above = next((each for each in wide if each[0] >= width), None)
        if above is not None:
            return _on_line(below[-1], above, width)
        if len(below) <= 2 and width == below[-1][0] + 1:
            return below[-1][1]  # it may be so: who does not try does not know
        return None if len(below) == 1 else max(below[-1][1], _on_line(below[-2], below[-1], width))


def _on_line(one: tuple[int, float], other: tuple[int, float], width: int) -> float:
    return one[1] + (other[1] - one[1]) * (width - one[0]) / (other[0] - one[0])


def _key(rows: int, width: int) -> tuple[int, int]:
    return about(rows), width


def about(rows: int) -> int:
    """Batches of 5 to 8 rows are taken for alike, and so on: rows come and go, and a time must be known soon."""
    return 1 << (rows - 1).bit_length()


class Account:
    """What drafts have brought and cost a batch of such a size, in steps without drafts."""

    def __init__(self, *, lends: bool = True, beside: Account | None = None) -> None:
        """`beside`: of batches of the same size, whose steps without drafts take as long. `lends`: some may be lost at
        first. Else two hundredths of the time must have paid for half a step before a try: where a step that checks
        drafts takes several times as long as others, three are much of a short job."""
        self._steps = AT_FIRST if lends else 0.0
        self._earned, self._again = (EARNED, AGAIN) if lends else (2 * EARNED, AGAIN / 2)
        # Checks; before, each loses a step at most: two may be of one moment in which a GPU's kernels are compiled.
        self._enough = 3 if lends else 2
        self._plain: deque[float] = deque(maxlen=PLAIN_SAMPLES)
        self._plain_tokens: deque[float] = deque(maxlen=PLAIN_SAMPLES)
        self._plain_s: float | None = None  # None: more are known since
        self._checks: deque[float] = deque(maxlen=SAMPLES)
        self._lost = self._charged = 0.0  # in steps that check drafts, since these have last brought the most
        self.doubted = 0.0  # what a step without drafts was thought to take, until that is timed anew
        if beside is not None:
            self._plain, self._plain_tokens = beside._plain.copy(), beside._plain_tokens.copy()
        self.is_spent = not lends  # nothing may be tried until more steps have passed

    @property
    def plain_s(self) -> float:
        """In which steps without drafts bring a token of each row; 0 while none is known.

        That is more than one of them takes: one that follows a row's prompt tells nothing of the row yet.
        """
        if self._plain_s is None:
            most = PLAIN_BUSY * median(self._plain) if self._plain else 0.0
            told = sum(self._plain_tokens)
            self._plain_s = sum(min(each, most) for each in self._plain) / told if told else 0.0
        return self._plain_s

    @property
    def rests(self) -> int:
        """Steps in which nothing may be tried, about."""
        return min(LONGEST_REST, math.ceil((self._again - self._steps) / self._earned)) if self.is_spent else 0

    @property
    def owes(self) -> bool:
        """Whether drafts have cost more than they brought, and than each step since allows to lose."""
        return self._steps < AT_FIRST

    def plain(self, seconds: float, tokens: float, steps: int = 1) -> None:
        """A step without drafts that follows one without, and so many tokens a row; or so many, on average."""
        self._plain.extend([seconds] * min(steps, PLAIN_SAMPLES))
        self._plain_tokens.extend([tokens] * min(steps, PLAIN_SAMPLES))
        self._plain_s = None
        self.earned(steps)

    def earned(self, steps: int) -> None:
        """So many steps without drafts, of which it is not known what they took."""
        self._add(self._earned * steps)

    def back(self, seconds: float, tokens: float) -> None:
        """A step without drafts behind one with: it finds nothing under way, and tells nothing of most rows."""
        if plain := self.plain_s:
            self._add(self._earned + tokens - min(PLAIN_BUSY, seconds / plain))

    def waited(self, seconds: float, tokens: float) -> None:
        """A step that has waited for what it is fed, and then had no drafts: it finds nothing under way, either."""
        self.back(max(seconds, (1 + WAIT) * self.plain_s), tokens)

    def checked(self, seconds: float, tokens: float, plain: float) -> bool:
        """A step that has checked drafts, and so many tokens a row; `plain`: seconds for one without drafts.

        Tells whether that is to be timed again, since so much has been lost by it.
        """
        self._checks.append(seconds)
        most = BUSY * median_low(self._checks) if len(self._checks) >= self._enough else (1 + tokens) * plain
        counts = min(seconds, most) / plain
        self._add(self._earned + tokens - counts)
        self._lost = max(0.0, self._lost + counts - tokens)
        self._charged = self._charged + counts if self._lost else 0.0
        return self._lost > DOUBT

    def doubt(self, plain: float) -> None:
        """That a step without drafts takes so many seconds still."""
        self.doubted = plain

    def timed(self, plain: float) -> None:
        """What such a step takes: what was lost only because all steps take longer was not lost."""
        if self.doubted:
            slower = max(1.0, plain / self.doubted)
            self._add(self._charged * (1 - 1 / slower))
            self._plain, self._plain_s = deque((each * slower for each in self._plain), PLAIN_SAMPLES), None
            self._lost = self._charged = self.doubted = 0.0

    def looked(self, seconds: float) -> None:
        """For drafts, without waiting for what the step is fed, in vain."""
        if plain := self.plain_s:
            self._add(-seconds / plain)

    def _add(self, steps: float) -> None:
        self._steps = min(SAVED, self._steps + steps)
        self.is_spent = self._steps < (self._again if self.is_spent else 0.0)


class Accounts:
    """Of batches of each size, with texts and without; on a CPU many rows take longer for each drafted token."""

    def __init__(self, *, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        self._of: dict[tuple[int, bool], Account] = {}

    def of(self, rows: int, *, has_texts: bool) -> Account:
        """Of batches of about so many rows; `has_texts`: most of them have one to draft from besides their own."""
        size = about(rows)
        if (size, has_texts) not in self._of:
            lends, beside = size <= FEW_ROWS or not self._on_cpu, self._of.get((size, not has_texts))
            self._of[size, has_texts] = Account(lends=lends, beside=beside)
        return self._of[size, has_texts]


class Try(NamedTuple):
    """One row in a step that may check drafts."""

    chance: float
    length: int  # of its draft; 0: it has none
    pace: float  # infinite: it may wait for others' drafts


def brought(rows: Sequence[Try], longest: int) -> tuple[list[float], list[float]]:
    """Tokens that a step is likely to bring where no draft is longer than 1, 2, ... to `longest`: of all rows, and, in
    steps without drafts, of the one that gains least."""
    all_, least = [0.0] * longest, [math.inf] * longest
    for chance, length, pace in rows:
        reached = tokens = 1.0
        for at in range(longest):
            if at < length:
                reached *= chance
                tokens += reached
            all_[at] += tokens
            least[at] = min(least[at], max(tokens, pace))
    return all_, least


def best_length(times: StepTimes, rows: Sequence[Try], *, alone: bool, usual: float = 0.0) -> int:
    """How long the drafts of this step should be at most; 0: none pays. `alone`: no prompt is in a hurry.

    `usual`: what steps without drafts take on average for a token of each row, where prompts come when rows end.
    """
    plain = times.known(len(rows), 1)
    if plain is None:
        return 0
    best, best_rate = 0, MARGIN * len(rows) / max(plain, usual)
    brings = brought(rows, max(row.length for row in rows))
    for longest, (tokens, least) in enumerate(zip(*brings, strict=True), 1):
        seconds = times.likely(len(rows), longest + 1)
        if seconds is None:
            break
        if tokens / seconds > best_rate and seconds <= SLOWED * plain * (least if alone else 1.0):
            best, best_rate = longest, tokens / seconds
    return best
