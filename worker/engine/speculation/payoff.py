"""One rule says whether drafts pay: tokens that a step brings, over what such a step takes. Pure.

The rule is `best_step`; it reads how likely drafts are accepted (`Chance`) and what steps of each width take (`Costs`).
Both are guesses at first, and making them takes time. So an `Account` counts what drafts have brought, and what they
and looking for them have cost, for rows with texts to draft from and for rows without. At most a hundredth of the time
and three steps of each are lost for good, of many rows on a CPU two hundredths and nothing in advance. A loss may mean
that all steps take longer than they did, on a machine that others use: it counts once steps without drafts have been
timed anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, median_low
from typing import NamedTuple

RECENT = 0.07  # weight of the latest drafted token in a row's chance; the first ones weigh more
SHARED_RECENT = 0.02  # and in that of all rows with a text to draft from, or of all without
FEW = 2.0  # drafted tokens, as many as what a row begins with counts for
FIRST_CHANCE = 0.5  # before anything is known
HOPE = 0.7  # what a row that has paused is tried with
UNLIKELY = 0.05  # chance of a place in a draft below which it is left out
LIKELY = 0.34  # a row whose drafts fail pauses only below that
LONGEST_PAUSE = 6  # times that it doubles: 64 steps
LONGEST_REST = 1 << LONGEST_PAUSE  # steps
PACE_RECENT = 0.2  # weight of the latest step in a row's pace

SLOWED = 1.08  # times what a step without drafts takes: so much later a row may get its tokens for others' drafts
MARGIN = 1.03  # by which drafts must be better
TRUST = 1.2  # so much less than usual a step may bring by what is guessed of it, while drafts owe nothing

SAMPLES = 24  # latest times of one kind of step, of which the lower quartile counts: more than a busy moment leaves
ENOUGH = 5  # of them
LEAST_SAMPLES = 2  # of which the lower one counts: a GPU compiles kernels in the first step of its kind, for seconds
STALE = 500  # steps after which a time is taken again; sooner where fewer have been taken
DOUBTED = 4  # ... and sooner still if it is out of line: so many, twice as many for each time that has been taken
PLAIN_STALE = 150  # of a step without drafts, which costs little: an old one would let drafts go on at a loss
BUSY = 1.5  # times the median of a step that checks drafts: one that takes longer says something of the machine only
PLAIN_BUSY = 3.0  # and of one without, which may come with a prompt or with none
PLAIN_SAMPLES = 64  # latest ones

EARNED = 0.01  # of a step: what each one allows to lose
AT_FIRST = 3.0  # steps that may be lost before anything is known
AGAIN = 1.0  # steps that must have been earned, where all were lost, until there is another try: a few at once say more
SAVED = 8.0  # steps that may be lost after drafts have paid
FEW_ROWS = 8  # of which a CPU checks drafts at little more than it takes anyway
DOUBT = 2.0  # steps lost since drafts last paid: after that a step without is timed again
WAIT = 0.25  # of a step: what it costs at least to wait for what a step is fed, and then to check nothing

MANY = 8  # rows of which one has a draft: so many may pay soon, as more is known of them
SILENT = 16  # steps in which fewer have one, and it does not pay: after that one in ...
SELDOM = 4  # ... so many asks again
DEAR = 2  # where asking takes long: steps after which fewer ask still
ASKED = 0.005  # of the time is what asking may take then


class Try(NamedTuple):
    chance: float
    length: int  # of its draft; 0: it has none
    pace: float  # tokens of such a step that the row is used to; infinite: it may wait for others' drafts


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


def best_step(
    costs: Costs,
    by_text: Sequence[Try],
    by_model: Sequence[Try] = (),
    forward_s: float = 0.0,
    *,
    alone: bool,
    usual: float = 0.0,
) -> tuple[int, bool]:
    """How long the drafts of this step should be at most, and whether a draft model makes some; (0, False): none pays.

    Where a token of row r is accepted with chance p_r, and its draft has l_r tokens, drafts of at most k bring

        tokens(k) = sum over r of (1 + p_r + p_r^2 + ... + p_r^min(k, l_r))

    in cost(k + 1) seconds, a draft model's besides in k * `forward_s` more. The k of the highest tokens(k) / seconds is
    chosen of those that bring at least `MARGIN` times what a step without drafts does, a token of each row in cost(1)
    seconds, or in `usual` ones where prompts come when rows end; and for which no row waits longer than `SLOWED` times
    what the tokens take that it gains, or, with a prompt in a hurry (not `alone`), than that of one token.
    """
    rows = len(by_text)
    plain = costs.known(rows, 1)
    if plain is None:
        return 0, False
    best, best_rate = (0, False), MARGIN * rows / max(plain, usual)
    for with_model, tries in ((False, by_text), (True, by_model)):
        tokens_and_least = zip(*brought(tries, max((row.length for row in tries), default=0)), strict=True)
        for longest, (tokens, least) in enumerate(tokens_and_least, 1):
            checks = costs.likely(rows, longest + 1)
            if checks is None:
                break
            took = checks + forward_s * longest if with_model else checks
            if tokens / took > best_rate and took <= SLOWED * (least if alone else 1.0) * plain:
                best, best_rate = (longest, with_model), tokens / took
    return best


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
        """The chance as it is known, or hoped of a row that has paused."""
        return max(HOPE, self.known) if self._hopes else self.known

    def learn(self, drafted: int, accepted: int, recent: float = RECENT) -> None:
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
        """True if it asks for no step that checks drafts; a row whose drafts keep failing asks ever more seldom.

        Rows try again in the same steps: one of many would not pay for the wider step, all together may.
        """
        is_poor = self.known < LIKELY and self._failures > 0
        self._hopes = is_poor and step % (1 << min(LONGEST_PAUSE, self._failures)) == 0
        return is_poor and not self._hopes

    def length(self, most: int) -> int:
        """Tokens of a draft, at most so many, that are likely enough to be reached."""
        if self.known**most >= UNLIKELY:
            return most
        return max(1, int(math.log(UNLIKELY, self.known))) if self.known > 0 else 1


def about(rows: int) -> int:
    """Batches of 5 to 8 rows are taken for alike, and so on: rows come and go, and a time must be known soon."""
    return 1 << (rows - 1).bit_length()


@dataclass
class Times:
    """Seconds of the latest steps of one kind."""

    each: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    usual: float = 0.0
    taken: int = 0  # how often, those included that are not remembered
    at: int = 0  # the step that was timed last

    def add(self, seconds: float, times: int) -> None:
        self.each.extend([seconds] * times)
        self.taken += times
        self.usual = sorted(self.each)[(len(self.each) + 1) // 4]


class Costs:
    """Seconds that steps of so many rows and such a width take: measured, and guessed from what is measured.

    Width 0 is a forward of a draft model.
    """

    def __init__(self) -> None:
        self.beside: Costs | None = None  # of steps that take about as much more for drafts, though not as much
        self._steps = 0
        self._times: dict[int, dict[int, Times]] = {}  # by rows, about, and width

    def _of(self, rows: int) -> dict[int, Times]:
        return self._times.setdefault(about(rows), {})

    def took(self, rows: int, width: int, seconds: float, steps: int = 1) -> None:
        """One step, or so many on average: these count for some, of all that are remembered."""
        self._steps += steps if width else 0
        times = self._of(rows).setdefault(width, Times(at=self._steps))
        if width > 1 and self._steps - times.at >= STALE:
            times.each.clear()
            times.each.append(times.usual)  # as much as a new one: the first check after a long time takes longer
        times.at = self._steps
        times.add(seconds, min(steps, ENOUGH))

    def usual(self, rows: int, width: int) -> float | None:
        """Seconds, however old or few; None when there are none."""
        times = self._of(rows).get(width)
        return times.usual if times is not None else None

    def known(self, rows: int, width: int) -> float | None:
        """Seconds; None when nothing is known, or what is known is old."""
        times = self._of(rows).get(width)
        if times is None or times.taken < LEAST_SAMPLES:
            return None
        # Few times may be those of busy moments: they are taken again soon, and sooner if they look like it.
        stale = (STALE if width > 1 else PLAIN_STALE) * min(1, times.taken / ENOUGH)
        seconds, sooner = times.usual, DOUBTED << min(SAMPLES, times.taken)
        if width > 1 and sooner < stale and self._is_doubtful(rows, width, seconds):
            seconds, stale = sorted(times.each)[len(times.each) // 4], sooner  # of three the least
        return None if self._steps - times.at >= stale else seconds

    def _is_doubtful(self, rows: int, width: int, seconds: float) -> bool:
        """True if that is much more than narrower steps let expect, so that busy moments may have been timed."""
        plain = self.usual(rows, 1)
        if plain is None:
            return False
        below = max(((each, times.usual) for each, times in self._of(rows).items() if 1 < each < width), default=None)
        return seconds > BUSY * max(plain, _on_line((1, plain), below or (2, 2 * plain), width))

    def forget(self, rows: int) -> float:
        """Seconds that steps without drafts have taken, which are timed anew; 0: nothing was known."""
        return self._of(rows).pop(1, Times()).usual

    def forward_s(self, rows: int) -> float:
        """Seconds of a draft model's forward, by those of about as many rows; 0: the first one makes what it needs."""
        known = [(abs(of - about(rows)), each[0]) for of, each in self._times.items() if 0 in each]
        return min(((apart, times.usual) for apart, times in known if times.taken > 1), default=(0, 0.0))[1]

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
        points = [(1, plain), *wide]
        above = next((pair for pair in pairwise(points) if pair[1][0] >= width), None)
        if above is not None:
            return _on_line(*above, width)
        if len(points) <= 2 and width == points[-1][0] + 1:
            return points[-1][1]  # it may be so: who does not try does not know
        return None if len(points) == 1 else max(points[-1][1], _on_line(points[-2], points[-1], width))

    def _wide(self, rows: int) -> list[tuple[int, float]]:
        """Widths of steps that check drafts, and seconds, as far as they are known."""
        each = sorted(width for width in self._of(rows) if width > 1)
        return [(width, took) for width in each if (took := self.known(rows, width)) is not None]


def _on_line(one: tuple[int, float], other: tuple[int, float], width: int) -> float:
    return one[1] + (other[1] - one[1]) * (width - one[0]) / (other[0] - one[0])


class Account:
    """Balance of what drafts have brought and cost a batch of such a size, in steps without drafts."""

    def __init__(self, *, lends: bool = True, beside: Account | None = None) -> None:
        """`beside`: of batches of the same size, whose steps without drafts take as long. `lends`: some may be lost at
        first. Else two hundredths of the time must have paid for half a step before a try: where a step that checks
        drafts takes several times as long as others, three are much of a short job."""
        self.steps = AT_FIRST if lends else 0.0
        self._earned, self._again = (EARNED, AGAIN) if lends else (2 * EARNED, AGAIN / 2)
        # Checks; before, each loses a step at most: two may be of one moment in which a GPU's kernels are compiled.
        self._enough = 3 if lends else 2
        self._plain: deque[tuple[float, float]] = deque(maxlen=PLAIN_SAMPLES)  # seconds and tokens
        if beside is not None:
            self._plain.extend(beside._plain)
        self._plain_s: float | None = None  # None: more are known since
        self._checks: deque[float] = deque(maxlen=SAMPLES)
        self._lost = self._charged = 0.0  # in steps that check drafts, since these have last brought the most
        self.doubted = 0.0  # seconds that a step without drafts was thought to take, until that is timed anew
        self.is_spent = not lends  # nothing may be tried until more steps have passed

    @property
    def plain_s(self) -> float:
        """In which steps without drafts bring a token of each row; 0 while none is known.

        That is more than one of them takes: one that follows a row's prompt reports nothing of the row yet.
        """
        if self._plain_s is None:
            most = PLAIN_BUSY * median(each for each, _ in self._plain) if self._plain else 0.0
            tokens = sum(each for _, each in self._plain)
            self._plain_s = sum(min(each, most) for each, _ in self._plain) / tokens if tokens else 0.0
        return self._plain_s

    @property
    def rests(self) -> int:
        return min(LONGEST_REST, math.ceil((self._again - self.steps) / self._earned)) if self.is_spent else 0

    @property
    def owes(self) -> bool:
        """True if drafts have cost more than they brought, and than each step since allows to lose."""
        return self.steps < AT_FIRST

    def plain(self, seconds: float, tokens: float, steps: int = 1) -> None:
        """A step without drafts that follows one without, and so many tokens a row; or so many, on average. `seconds`:
        0 where it is not known what they took."""
        if seconds:
            self._plain.extend([(seconds, tokens)] * min(steps, PLAIN_SAMPLES))
            self._plain_s = None
        self.add(self._earned * steps)

    def waited(self, seconds: float, tokens: float, least: float = 0.0) -> None:
        """A step without drafts that finds nothing under way, and brings nothing of most rows: it follows one with
        drafts, or has waited for what it is fed, which costs at `least` so much of a step."""
        if plain := self.plain_s:
            self.add(self._earned + tokens - min(PLAIN_BUSY, max(seconds / plain, 1 + least if least else 0.0)))

    def checked(self, seconds: float, tokens: float, plain: float) -> bool:
        """A step that has checked drafts, and so many tokens a row; `plain`: seconds for one without drafts.

        True if that is to be timed again, since so much has been lost by it.
        """
        self._checks.append(seconds)
        most = BUSY * median_low(self._checks) if len(self._checks) >= self._enough else (1 + tokens) * plain
        counts = min(seconds, most) / plain
        self.add(self._earned + tokens - counts)
        self._lost = max(0.0, self._lost + counts - tokens)
        self._charged = self._charged + counts if self._lost else 0.0
        return self._lost > DOUBT

    def timed(self, plain: float) -> None:
        """Seconds of a step without drafts: what was lost only because all steps take longer was not lost."""
        slower = max(1.0, plain / self.doubted)
        self.add(self._charged * (1 - 1 / slower))
        self._plain = deque([(each * slower, tokens) for each, tokens in self._plain], PLAIN_SAMPLES)
        self._plain_s = None
        self._lost = self._charged = self.doubted = 0.0

    def looked(self, seconds: float) -> None:
        """For drafts, without waiting for what the step is fed, in vain."""
        if plain := self.plain_s:
            self.add(-seconds / plain)

    def add(self, steps: float) -> None:
        self.steps = min(SAVED, self.steps + steps)
        self.is_spent = self.steps < (self._again if self.is_spent else 0.0)


class Silence:
    """Steps in a row in which drafts suggest themselves for few rows, and do not pay: after some it is asked seldom."""

    def __init__(self) -> None:
        self.steps = 0
        self._asking_s = 0.0, 0.0  # the latest two: one may be of a busy moment

    def asked(self, seconds: float, drafts: Sequence[Sequence[int]], *, pays: bool) -> None:
        """A step has asked all rows, in so much time; `pays`: by what they are likely to bring now."""
        is_silent = not pays and MANY * sum(map(bool, drafts)) < len(drafts)
        self.steps, self._asking_s = self.steps + 1 if is_silent else 0, (self._asking_s[1], seconds)

    def asks_at(self, step: int, step_s: float | None) -> int:
        """The next step that asks, this one or a later one; `step_s`: None where no clock may decide.

        One in a power of two does, so that rows which pause are asked when they try again.
        """
        if self.steps <= DEAR:
            return step
        every = SELDOM
        while step_s is not None and every < LONGEST_REST and min(self._asking_s) > ASKED * every * step_s:
            every *= 2
        return step if every == SELDOM and self.steps <= SILENT else -(-step // every) * every
