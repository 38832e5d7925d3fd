"""Relief of memory pressure: what a worker gives up, step by step. Pure.

First what costs only time later: freed memory, KV of earlier prompts. Then no more rows than there are; then fewer,
and the youngest sequences go back to the queue, where another worker takes them, or this one later. Critical pressure
skips the waiting between the steps. When the pressure is over, rows come back slowly: memory that was short a moment
ago is short again soon.
"""

from dataclasses import dataclass

from shared.machine.memory import Pressure

CALM_LOOKS = 10  # without pressure, before the rows double again
SHARE_LEFT = 0.75  # of the rows, after one more look under pressure
CACHES_AT, HOLD_AT, FEWER_AT = 1, 2, 4  # looks in a row under pressure
NO_ROWS_AT = 12  # critical looks in a row, after which even one row is too many


@dataclass(frozen=True)
class Relief:
    """Measures that are in force now."""

    note: str = ""  # for people; "": nothing
    drops_caches: bool = False
    holds_guests: bool = False  # training beside rows waits
    most_rows: int = 0
    hand_back: int = 0  # rows that go back to the queue


class MemoryRelief:
    """Follows the pressure, look by look."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = self._most = max_rows
        self._strained = self._critical = self._calm = 0

    def look(self, pressure: Pressure, rows: int) -> Relief:
        """One look, with so many rows in use."""
        if pressure == "normal":
            return self._relax()
        self._calm = 0
        self._strained += 1
        self._critical = self._critical + 1 if pressure == "critical" else 0
        if self._critical:
            self._strained = max(self._strained, FEWER_AT)
        if self._strained < HOLD_AT:
            return Relief("cached KV was dropped", True, most_rows=self._most)
        before, fewest = self._most, 0 if self._critical >= NO_ROWS_AT else 1
        self._most = max(fewest, min(self._most, rows))
        if self._strained >= FEWER_AT:
            share = 0.5 if self._critical else SHARE_LEFT
            self._most = max(fewest, min(self._most, int(rows * share)))
        self._most = min(before, self._most)
        back = max(0, rows - self._most)
        note = f"{self._most} of {self._max_rows} rows are filled"
        return Relief(note, True, True, self._most, back)

    def _relax(self) -> Relief:
        self._strained = self._critical = 0
        if self._most == self._max_rows:
            return Relief(most_rows=self._most)
        self._calm += 1
        if self._calm % CALM_LOOKS == 0:
            self._most = min(self._max_rows, max(1, 2 * self._most))
            if self._most == self._max_rows:
                return Relief(most_rows=self._most)
        return Relief(
            f"{self._most} of {self._max_rows} rows are filled until it is over for good", True, True, self._most
        )
