"""How large a microbatch may be, so that one takes a bounded time: whoever shares the thread waits for at most one.

A microbatch of n positions takes about a + b n: what starting thousands of operations costs, however few positions they
have, and the work itself. Both follow from the measured times of microbatches of different sizes.

Invariants. Between one position and the largest size that the settings allow; without a bound always that size. A bound
that is less than twice a is not kept: at least half of a microbatch's time is work, or a train step would take many
times as long for little.
"""

from dataclasses import dataclass

FIRST = 256  # positions, before anything is known of this machine
STEP = 2.0  # at most, from the sizes that were measured to the next
KEPT = 0.9  # weight of everything before the latest measurement
WARM_UP = 2  # microbatches in which kernels are compiled
OUTLIER = 4.0  # times what was expected
LOOK_UP_TO = 8.0  # bounds: to where twice the size is tried, when the smallest one takes too long


@dataclass
class MicrobatchSize:
    """Follows the measured times; sizes in positions, times in seconds."""

    largest: int
    bound_s: float = 0.0  # 0: no bound

    def __post_init__(self) -> None:
        self.positions = min(FIRST, self.largest) if self.bound_s else self.largest
        self._seen = 0
        self._weight = self._n = self._t = self._nn = self._nt = 0.0  # weighted sums

    def took(self, positions: int, seconds: float) -> None:
        """A microbatch of this size has taken so long."""
        if not self.bound_s or positions <= 0 or seconds <= 0:
            return
        if 2 * positions < self.positions and seconds < self.bound_s:
            return  # the rest of a train step: too small to tell anything
        self._seen += 1
        if self._seen <= WARM_UP:
            return
        if self._weight:
            start, each = self._line()
            seconds = min(seconds, OUTLIER * (start + each * positions))
        self._add(positions, seconds)
        wanted = self._wanted(positions, seconds)
        usual = self._n / self._weight
        self.positions = max(1, int(min(max(wanted, usual / STEP), usual * STEP, self.largest)))

    def _wanted(self, positions: int, seconds: float) -> float:
        start, each = self._line()
        at_floor = positions > 1.5 * self.positions  # one sample, which is never cut
        if not start and at_floor and seconds < LOOK_UP_TO * self.bound_s:
            return STEP * positions  # of one size nothing can be told apart
        return max((self.bound_s - start) / each, start / each)

    def _add(self, positions: int, seconds: float) -> None:
        self._weight = KEPT * self._weight + 1
        self._n = KEPT * self._n + positions
        self._t = KEPT * self._t + seconds
        self._nn = KEPT * self._nn + positions * positions
        self._nt = KEPT * self._nt + positions * seconds

    def _line(self) -> tuple[float, float]:
        """a and b, by least squares; a is 0 while all sizes are about the same."""
        n, t = self._n / self._weight, self._t / self._weight
        spread = self._nn / self._weight - n * n
        if spread < (0.1 * n) ** 2:
            return 0.0, t / n
        each = min(max((self._nt / self._weight - n * t) / spread, 0.02 * t / n), t / n)
        return t - each * n, each
