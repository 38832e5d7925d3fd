"""How large a microbatch may be, so that one takes a bounded time: whoever shares the thread waits for at most one.

Invariant: between one position and the largest size that the settings allow; without a bound always that size.
"""

from dataclasses import dataclass

FIRST = 256  # positions, before anything is known of this machine
GROWTH = 2.0  # from one microbatch to the next: the speed of a small one says little of a large one's
RECENT = 0.3  # weight of the latest microbatch in the measured speed


@dataclass
class MicrobatchSize:
    """Follows the measured speed; sizes in positions, times in seconds."""

    largest: int
    bound_s: float = 0.0  # 0: no bound

    def __post_init__(self) -> None:
        self._rate = 0.0  # positions per second
        self.positions = min(FIRST, self.largest) if self.bound_s else self.largest

    def took(self, positions: int, seconds: float) -> None:
        """A microbatch of this size has taken so long."""
        if not self.bound_s or positions <= 0 or seconds <= 0:
            return
        if 2 * positions < self.positions and seconds < self.bound_s:
            return  # the rest of a train step: too small to tell anything
        rate = positions / seconds
        self._rate = rate if not self._rate else RECENT * rate + (1 - RECENT) * self._rate
        wanted = min(self._rate * self.bound_s, GROWTH * max(positions, self.positions), self.largest)
        self.positions = max(1, int(wanted))
