"""Limits on how far generation may run ahead of training, and an alert when all samples are too old to learn from.

Letters: B groups per train step, v train steps done, K the largest allowed age of a token in policy versions.

Invariants.
- Capacity, AReaL (arXiv 2505.24298 eq. 3): at most (K + v + 1) * B groups are ever accepted or running, so that a group
  started now is consumed at most K versions later. With K = 0 all groups of a train step start after the version before
  it is published: strictly on-policy.
- Capacity alone is no proof (a straggler, a rejected version, a resumed run), so the age of the *oldest token* is
  checked again at consumption.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.frames import VersionSpan
from trainer.rollouts.groups import RolloutGroup

UNKNOWN_LAG = 1 << 30


@dataclass(frozen=True)
class Pace:
    """Limits on how far sampling runs ahead of training."""

    batch_groups: int  # B
    max_lag: int = 1  # K
    group_deadline_s: float = 600.0

    def capacity(self, steps_done: int, accepted: int, running: int) -> int:
        """Number of groups that may start now. `accepted` counts consumed and waiting groups, not the dropped ones."""
        return max(0, (self.max_lag + steps_done + 1) * self.batch_groups - (accepted + running))

    def too_old(self, lag: int) -> bool:
        """True if a trajectory whose oldest token is `lag` versions old must be dropped."""
        return lag > self.max_lag


def oldest_version(spans: Iterable[VersionSpan], adapter: str) -> int | None:
    """Smallest version number of `adapter` among the spans; 0 for tokens of the base; None without any span.

    A span of another adapter counts as the base: its age is not known.
    """
    versions = [_number(span.version, adapter) for span in spans if span.end > span.start]
    return min(versions, default=None)


def lag_of(oldest: int | None, policy_steps: Mapping[int, int], policy_step: int) -> int:
    """Age in policy steps. `policy_steps` maps adapter versions to the policy step that made them.

    Versions need not be consecutive: rejected candidates use up numbers. The base is what the run began with, step 0. A
    version unknown here is another run's, or of a start that was killed: too old for every bound.
    """
    if oldest is None:
        return 0
    made_in = policy_steps.get(oldest, 0 if oldest == 0 else None)
    return UNKNOWN_LAG if made_in is None else policy_step - made_in


class StaleWatch:
    """Counts samples dropped as too old since the last batch; alerts once when there are `after` of them.

    A run all of whose samples are too old would wait for ever, and say nothing.
    """

    def __init__(self, what: str = "samples", after: int = 1 << 30, max_lag: int = 0) -> None:
        self._what = what
        self._after = after
        self._max_lag = max_lag
        self._count = 0
        self._reason = ""
        self._reported = False
        self._due = asyncio.Event()

    def dropped(self, groups: Sequence[RolloutGroup], lag: int) -> None:
        """Count groups that were too old; `lag` is the age of the last one."""
        self._count += sum(len(group.trajectories) for group in groups)
        by = sorted({span.version or "the base" for t in groups[-1].trajectories for span in t.spans})
        age = "which is no version of this run" if lag == UNKNOWN_LAG else f"{lag} policy steps old"
        self._reason = (
            f"{self._count} {self._what} in a row were too old to learn from, none was fresh: the last ones were "
            f"sampled by {', '.join(by) or 'unknown versions'}, {age} (the bound is {self._max_lag})"
        )
        if self._count >= self._after and not self._reported:
            self._due.set()

    def used(self) -> None:
        """A batch was fresh enough."""
        self._count, self._reported = 0, False
        self._due.clear()

    async def wait(self) -> str:
        """Until all is stale; the reason. May be cancelled without loss."""
        await self._due.wait()
        return self._reason

    def reported(self) -> None:
        """Suppress further alerts until a batch has been fresh."""
        self._due.clear()
        self._reported = True


def _number(version: str, adapter: str) -> int:
    name, _, number = version.rpartition("@")
    return int(number) if name == adapter and number.isdigit() else 0
