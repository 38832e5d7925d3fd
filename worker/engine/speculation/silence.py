"""When rows are asked again that have been asked for drafts in vain: to ask many takes time itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from worker.engine.speculation.payoff import LONGEST_REST, StepTimes

MANY = 8  # rows of which one has a draft: so many may pay soon, as more is known of them
SILENT = 16  # steps in which fewer have one, and it does not pay: after that one in ...
SELDOM = 4  # ... so many asks again
DEAR = 2  # where asking takes long: steps after which fewer ask still
ASKED = 0.005  # of the time is what asking may take then


class Silence:
    """Steps in a row in which drafts suggest themselves for few rows, and do not pay: after some it is asked seldom."""

    def __init__(self) -> None:
        self._steps = 0
        self._asking_s = 0.0, 0.0  # the latest two: one may be of a busy moment

    def ends(self) -> None:
        """A new row has come, or another text."""
        self._steps = 0

    def asked(self, seconds: float, drafts: Sequence[Sequence[int]], *, pays: bool) -> None:
        """A step has asked all rows, in so much time; `pays`: by what they are likely to bring now."""
        is_silent = not pays and MANY * sum(map(bool, drafts)) < len(drafts)
        self._steps, self._asking_s = self._steps + 1 if is_silent else 0, (self._asking_s[1], seconds)

    def asks_at(self, step: int, times: StepTimes | None, rows: int) -> int:
        """The next step that asks, this one or one behind it; `times`: None where no clock may decide.

        One in a power of two does, so that rows which pause are asked when they try again.
        """
        if self._steps <= DEAR:
            return step
        every, step_s = SELDOM, None if times is None else times.usual(rows, 1)
        while step_s is not None and every < LONGEST_REST and min(self._asking_s) > ASKED * every * step_s:
            every *= 2
        return step if every == SELDOM and self._steps <= SILENT else -(-step // every) * every
