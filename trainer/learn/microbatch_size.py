"""Size of a microbatch with a bounded duration: other work of the thread waits for at most one.

And a bounded memory. What is not in memory yet is slow to get, and where there is none left, everything that was freed
is given back first: on an H100 a microbatch of 8,192 positions asked for 35 GB, and rows waited for 1.8 to 6.5 s. So no
size is tried that is expected to take more, the first one included.

Times are kept by size, in steps of a factor of two: thousands of operations have to be started however few positions
they have, a GPU is hardly busier with four times as many, and in between the curve has bumps, so no line goes through
it. From the smallest size on, each larger one is tried until time grows in proportion, or is too long. A size is not
measured again while another is taken, so what the first microbatch of a shape takes to compile is left out: it kept a
GPU at 256 positions for good. Where nobody waits, the largest size that was tried is measured a few times before it is
judged, or one slow moment would decide as long.

While nothing else computes between microbatches, no row waits, and they may take several times as long, as long as a
prompt's piece may take then, and several times the memory, which no row's KV needs.

Invariants. Between one position and the largest size that the settings allow; without a bound always that size. A size
that keeps the bound is taken if it reaches half of the best rate that was seen, or a train step would take many times
as long for little. If none does, others wait longer than they should in any case. Then it is, of those that reach half
of the best rate, the fastest one that takes at most half as long again as the smallest size; if there is none, the
smallest of them. On an H200 512 positions of a 4B took 0.21 s, and 1,024 took 0.23 s.
"""

from collections import deque
from dataclasses import dataclass
from math import log2
from statistics import median

FIRST = 256  # positions, before anything is known of this machine
RECENT = 5  # durations stored for each size
WARM_UP = 1  # first times of a size that are left out
SURE = 3  # times of a size by which it is judged where nobody waits
ALONE = 0.1  # of a microbatch's time: what passes before it while nothing else computes
UNDISTURBED = 4  # times both bounds then; a row that comes waits for one such microbatch
PATIENCE = 16.0  # bounds: what the next size is expected to take at most, while sizes are tried
BUMP = 2  # sizes that a bump in the curve may span
IN_PROPORTION = 1.7  # times as long for twice the size, over so many sizes: work by now, not the start of operations
ENOUGH = 0.5  # of the best rate
LITTLE = 1.5  # times as long, of what takes longer than the bound in any case
MARGIN = 1.25  # bytes of a position grow with the size
CHANGED = 2.0  # the machine is another one when a known size takes this many times as long, or as short


@dataclass
class MicrobatchSize:
    """Follows the measured times; sizes in positions, times in seconds."""

    largest: int
    bound_s: float = 0.0  # 0: no bound
    bound_bytes: int = 0  # 0: none; without a bound on the time it means nothing
    expected_bytes: int = 0  # of a position, before one was measured

    def __post_init__(self) -> None:
        self._position_bytes: deque[float] = deque(maxlen=RECENT)
        self._times_bounds = 1  # by what has computed lately
        self.positions = min(FIRST, self._most) if self.bound_s else self.largest
        self._times: dict[int, _Times] = {}  # by log2 of the size
        self._floor = 0  # less was asked for in vain: one sample is never cut

    @property
    def _most(self) -> int:
        """The most positions that are expected to stay within the bound on memory, and that the settings allow."""
        position = MARGIN * max(self._position_bytes, default=self.expected_bytes)
        if not self.bound_bytes or not position:
            return self.largest
        return min(self.largest, max(1, int(self._times_bounds * self.bound_bytes / position)))

    @property
    def _allowed_s(self) -> float:
        return self._times_bounds * self.bound_s

    def took(
        self,
        asked: int,
        positions: int,
        tokens: int,
        seconds: float,
        nbytes: int = 0,
        *,
        waited_s: float | None = None,
        is_new: bool = False,
    ) -> None:
        """Record the seconds of a microbatch: cut to `asked` positions, it has this many positions and tokens.

        Tokens are those of completions: a prompt that is computed again in each of many small parts is no work done.
        `waited_s`: that others computed before it; None: not known. `is_new`: something was compiled for its shape.
        """
        if not self.bound_s or tokens <= 0 or seconds <= 0:
            return
        before, self._times_bounds = self._times_bounds, 1
        if waited_s is not None and waited_s < ALONE * seconds:
            self._times_bounds = UNDISTURBED
        if self._times_bounds != before:
            self._choose()
        if nbytes:
            self._position_bytes.append(nbytes / positions)
            self.positions = min(self.positions, self._most)
        if 2 * positions < asked:
            return  # the rest of a train step: too small to count
        size = _step(asked)
        if 2 * positions > 3 * asked:
            self._floor = max(self._floor, size)
        times = self._times.setdefault(size, _Times())
        usual = times.seconds
        times.add(tokens, seconds, is_new=is_new)
        if usual and times.full and not 1 / CHANGED < times.seconds / usual < CHANGED:
            self._times = {size: times}
        self._choose()

    def _choose(self) -> None:
        known = {size: times for size, times in sorted(self._times.items()) if times.known}
        if known:
            self.positions = min(self._next(known), self._most)

    def _next(self, known: "dict[int, _Times]") -> int:
        """The next size: an untried one, or the best of the known ones."""
        low, high = min(known), max(known)
        if 1 << high < self.largest and min(2 << high, self.largest) <= self._most and self._may_try_more(known):
            return 1 << (high + 1)
        if self._times_bounds > 1 and known[high].count < SURE and min(1 << high, self.largest) <= self._most:
            return 1 << high
        best = max(times.rate for times in known.values())
        enough = [size for size, times in known.items() if times.rate >= ENOUGH * best]
        kept = [size for size in enough if known[size].seconds <= self._allowed_s]
        if kept:
            return 1 << kept[-1]
        if enough[0] == low > self._floor:
            return 1 << (low - 1)
        longest = LITTLE * known[low].seconds
        hardly_longer = [size for size in enough if known[size].seconds <= longest]
        return 1 << max(hardly_longer, key=lambda size: known[size].rate, default=enough[0])

    def _may_try_more(self, known: "dict[int, _Times]") -> bool:
        seconds = [times.seconds for times in known.values()][-BUMP - 1 :]
        doublings = len(seconds) - 1
        growth = (seconds[-1] / seconds[0]) ** (1 / doublings) if doublings else 1.0
        if seconds[-1] * min(max(growth, 1.0), 2.0) > PATIENCE * self.bound_s:
            return False
        return seconds[-1] < self._allowed_s / 2 or doublings < BUMP or growth < IN_PROPORTION


class _Times:
    """Recent durations of microbatches of about one size."""

    def __init__(self) -> None:
        self._skipped = 0
        self._last: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def add(self, tokens: int, seconds: float, *, is_new: bool) -> None:
        if self._skipped < (RECENT if is_new else WARM_UP):
            self._skipped += 1
        else:
            self._last.append((tokens, seconds))

    @property
    def known(self) -> bool:
        return bool(self._last)

    @property
    def count(self) -> int:
        return len(self._last)

    @property
    def full(self) -> bool:
        return len(self._last) == RECENT

    @property
    def seconds(self) -> float:
        """The median; 0 before the first."""
        return median(seconds for _, seconds in self._last) if self._last else 0.0

    @property
    def rate(self) -> float:
        """Tokens a second, the median."""
        return median(tokens / seconds for tokens, seconds in self._last)


def _step(positions: int) -> int:
    return round(log2(positions))
