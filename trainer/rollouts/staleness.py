"""Notices when all that was sampled is too old to learn from: a run that would wait for ever, and say nothing."""

import asyncio
from collections.abc import Sequence

from trainer.rollouts.groups import RolloutGroup
from trainer.rollouts.pacing import UNKNOWN_LAG


class StaleWatch:
    """Counts samples dropped as too old since the last batch; says once that there are `after` of them."""

    def __init__(self, what: str = "samples", after: int = 1 << 30, max_lag: int = 0) -> None:
        self._what = what
        self._after = after
        self._max_lag = max_lag
        self._count = 0
        self._reason = ""
        self._told = False
        self._due = asyncio.Event()

    def dropped(self, groups: Sequence[RolloutGroup], lag: int) -> None:
        """Groups that were too old, and the age of the last one."""
        self._count += sum(len(group.trajectories) for group in groups)
        by = sorted({span.version or "the base" for t in groups[-1].trajectories for span in t.spans})
        age = "which is no version of this run" if lag == UNKNOWN_LAG else f"{lag} policy steps behind"
        self._reason = (
            f"{self._count} {self._what} in a row were too old to learn from, none was fresh: the last ones were "
            f"sampled by {', '.join(by) or 'nobody knows what'}, {age} (the bound is {self._max_lag})"
        )
        if self._count >= self._after and not self._told:
            self._due.set()

    def used(self) -> None:
        """A batch was fresh enough."""
        self._count, self._told = 0, False
        self._due.clear()

    async def wait(self) -> str:
        """Until all is stale; the reason. May be cancelled without loss."""
        await self._due.wait()
        return self._reason

    def told(self) -> None:
        """A person knows: nothing more until a batch has been fresh."""
        self._due.clear()
        self._told = True
