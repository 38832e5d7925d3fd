"""When rows are asked again that have been asked for drafts in vain: to ask many takes time itself. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from worker.engine.speculation.payoff import LONGEST_REST, StepTimes

MANY = 8  # rows of which one has a draft: so many may pay soon, as more is known of them
SILENT = 4  # steps in which fewer have one, and it does not pay: after that it is asked for again seldom, ...
SELDOM = 4  # ... in one step of so many, or of more where to ask takes long
ASKED = 0.005  # of the time is what asking may take then


class Silence:
    """Steps in a row in which drafts suggest themselves for few rows, and do not pay: after some it is asked seldom."""

    def __init__(self) -> None:
        self._steps, self._asking_s = 0, 0.0

    def ends(self) -> None:
        """A new row has come."""
        self._steps = 0

    def asked(self, seconds: float, drafts: Sequence[Sequence[int]], *, pays: bool) -> None:
        """A step has asked all rows, in so much time; `pays`: by what they are likely to bring now."""
        is_silent = not pays and MANY * sum(map(bool, drafts)) < len(drafts)
        self._steps, self._asking_s = self._steps + 1 if is_silent else 0, seconds

    def asks_at(self, step: int, times: StepTimes, rows: int) -> int:
        """The next step that asks, this one or one behind it.

        One in a power of two does, so that rows which pause are asked when they try again.
        """
        if self._steps <= SILENT:
            return step
        every, step_s = SELDOM, times.usual(rows, 1) or math.inf
        while every < LONGEST_REST and self._asking_s > ASKED * every * step_s:
            every *= 2
        return -(-step // every) * every
