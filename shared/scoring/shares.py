"""Shares of the reward processes by API key, and counts of samples that ran out of time; turns are those of
shared/turns.py.
"""

from dataclasses import dataclass, field

GIVE_UP_AFTER = 16  # samples in a row that ran out of time
ALIKE = 2  # from which on a job is taken for one of those with the same reward


@dataclass(eq=False)
class Lateness:
    """Number of samples in a row that have run out of time."""

    in_a_row: int = 0

    def saw(self, late: bool) -> None:
        """A sample was scored, or ran out of time."""
        self.in_a_row = self.in_a_row + 1 if late else 0


@dataclass
class Share:
    """An asker's share of the reward processes, and its samples that have run out of time."""

    key: str = ""  # name of the API key; "" where none is needed
    job: str = ""
    mine: Lateness = field(default_factory=Lateness)
    of_all: Lateness = field(default_factory=Lateness)  # of all the key's jobs with the same reward

    def saw(self, late: bool) -> None:
        """A sample was scored, or ran out of time."""
        self.mine.saw(late)
        self.of_all.saw(late)

    @property
    def given_up(self) -> bool:
        """True if so many samples in a row have run out of time that the next ones are expected to."""
        return self.late >= GIVE_UP_AFTER

    @property
    def late(self) -> int:
        """Samples in a row that ran out of time, here or, when it looks alike here, in all of the key's jobs."""
        return max(self.mine.in_a_row, self.of_all.in_a_row) if self.mine.in_a_row >= ALIKE else self.mine.in_a_row

    def try_again(self) -> None:
        """Allow one more sample, which may show that the reward was not at fault."""
        for lateness in (self.mine, self.of_all):
            lateness.in_a_row = min(lateness.in_a_row, GIVE_UP_AFTER - 1)
