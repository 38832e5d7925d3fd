"""Report of a replay (shared/replay.py): what was recorded of a sequence, and what a second computation says of it."""

from typing import Literal

import msgspec

Verdict = Literal["same", "tie", "wrong", "not judged"]


class Difference(msgspec.Struct, frozen=True):
    """A token that the replay did not confirm at once."""

    position: int
    verdict: Verdict
    token: int  # recorded
    replayed: int
    probability: float  # of the recorded token, as recorded
    replayed_probability: float  # of the recorded token, in the replay
    gap: float  # by so much probabilities would have to move for the recorded token to be drawn


class ReplayReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of replaying one sequence."""

    id: str
    worker: str  # that wrote it
    replayed_by: tuple[str, ...]
    bound: float  # of probability
    tokens: int
    same: int
    ties: int
    wrong: int
    not_judged: int
    largest_gap: float  # of what was judged the same or a tie
    differences: tuple[Difference, ...] = ()
    note: str = ""  # why tokens were not judged

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of any of its tokens."""
        if self.wrong:
            return "wrong"
        if self.ties:
            return "tie"
        return "same" if self.same or not self.tokens else "not judged"
