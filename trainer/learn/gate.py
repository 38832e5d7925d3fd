"""The checks that an adapter version must pass before it may become the latest, and when it must step down again.

Every check has a name, which stands in the log and in the version's manifest, and says what it saw. All of them are
pure: numbers in, `GateCheck` out. What has to be computed with the model stands in trainer/learn/measures.py.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import BaseModel, Field

from shared.adapters import GateCheck
from trainer.state import Arrays


@dataclass(frozen=True)
class GateLimits:
    """The bounds of the checks that need the model."""

    max_update_rms: float = 0.05  # of one train step, over all adapter parameters
    max_probe_kl: float = 0.5  # nats per token, from the last good version, on fixed prompts
    max_base_kl: float = 2.0  # as max_probe_kl, from what the run began with: small steps add up
    max_best_kl: float = 1.0  # from the best version that was judged


class GateSettings(BaseModel):
    """Part of TrainSettings: these bounds and others, and how many versions may miss them."""

    max_update_rms: float = Field(
        default=0.05, gt=0, description="gate: largest root mean square of one update over all adapter parameters"
    )
    max_probe_kl: float = Field(
        default=0.5,
        gt=0,
        description="gate: largest KL divergence from the last good version on fixed prompts, nats per token",
    )
    max_base_kl: float = Field(
        default=2.0, gt=0, description="gate: the same from the base or start_from, with which the run began"
    )
    max_best_kl: float = Field(
        default=1.0, gt=0, description="gate: the same from the best version, once a version has been judged"
    )

    max_logprob_gap: float = Field(
        default=0.5,
        gt=0,
        description="posted trajectories: largest mean difference from the named version's log-probabilities, "
        "nats per token",
    )
    max_parity: float = Field(
        default=0.1,
        gt=0,
        description="gate: largest mean difference between log-probabilities in a worker and in the trainer",
    )
    reward_margin: float = Field(
        default=0.15, gt=0, description="how far rewards may fall below those of the best version"
    )
    min_groups: int = Field(default=16, ge=1, description="groups before a version is judged by its rewards")
    max_rejections: int = Field(default=5, ge=1, description="versions in a row that may fail before the run ends")
    max_rollbacks: int = Field(
        default=3, ge=1, description="rollbacks without a better version in between before the run ends"
    )

    def limits(self) -> GateLimits:
        """The bounds of the gate that a learner checks."""
        return GateLimits(self.max_update_rms, self.max_probe_kl, self.max_base_kl, self.max_best_kl)


def passed(checks: Iterable[GateCheck]) -> bool:
    """True if the version may be served."""
    return all(check.passed for check in checks)


def failures(checks: Iterable[GateCheck]) -> str:
    """The failed checks in one line."""
    return "; ".join(f"{check.name}: {check.detail}" for check in checks if not check.passed)


def finite_weights(weights: Arrays) -> GateCheck:
    """No parameter is infinite or not a number."""
    bad = sorted(name for name, value in weights.items() if not np.isfinite(value).all())
    return GateCheck("finite_weights", not bad, f"not finite: {', '.join(bad[:3])}" if bad else "")


def finite_gradients(nonfinite: int) -> GateCheck:
    """No minibatch had a gradient that is infinite or not a number."""
    return GateCheck("finite_gradients", nonfinite == 0, f"{nonfinite} updates left out" if nonfinite else "")


def fits(weights: Arrays, expected: Mapping[str, tuple[int, ...]]) -> GateCheck:
    """Names, shapes and with them the rank are those of the adapter that was served before."""
    given = {name: tuple(value.shape) for name, value in weights.items()}
    wrong = sorted(name for name in given.keys() | expected.keys() if given.get(name) != expected.get(name))
    detail = f"{wrong[0]}: {given.get(wrong[0])} in place of {expected.get(wrong[0])}" if wrong else ""
    return GateCheck("shapes", not wrong, detail)


def same_base(mine: str, served: str) -> GateCheck:
    """The trainer's base model is the one that workers serve; "" is not known."""
    same = not mine or not served or mine == served
    return GateCheck("base_model", same, "" if same else f"{mine[:12]} is not {served[:12]}")


def at_most(name: str, value: float, limit: float) -> GateCheck:
    """Check that a distance is within its bound.

    `update_norm`: of the parameters in one train step · `probe_kl`: from the last good version, on fixed prompts ·
    `base_kl`: from what the run began with, however small the steps are · `best_kl`: from the best version that was
    judged · `reload_parity`: of what a worker that has loaded the version computes.
    """
    return GateCheck(name, math.isfinite(value) and value <= limit, f"{value:.4g}, bound {limit:.4g}", value)


def reward_floor(reward: float, good: float | None, margin: float) -> GateCheck:
    """The held-out reward is not below the best served version's by more than the margin."""
    if good is None:
        return GateCheck("reward_floor", math.isfinite(reward), f"{reward:.4g}")
    return GateCheck("reward_floor", reward >= good - margin, f"{reward:.4g}, floor {good - margin:.4g}")


@dataclass(frozen=True)
class Standing:
    """Mean reward of a version over groups, and the standard error of that mean."""

    mean: float
    error: float


@dataclass
class RewardWatch:
    """Decides on a rollback from what served versions earn on new tasks.

    Groups are pooled until there are `min_groups`; the pool then judges the newest version in it. The version has
    collapsed when its mean is below the best good one's by more than `margin` and three standard errors of the
    difference: tasks differ in difficulty, so two batches of one policy differ too. The measure is the best, not the
    last, so that a slow decline is seen, and a rollback leaves it as it is: where the best version itself earns less
    than it did, rewards or tasks have changed, and what is learned from them is to be served to nobody.
    """

    margin: float
    min_groups: int
    memory: int = 5
    good: dict[int, Standing] = field(default_factory=dict)  # by version, oldest first
    pool: list[float] = field(default_factory=list)  # mean rewards of groups that have judged no version yet

    def add(self, version: int, group_means: Sequence[float]) -> int | None:
        """Count groups that `version` sampled; when it has collapsed, the best version (maybe itself) to go back to."""
        self.pool += group_means
        if len(self.pool) < self.min_groups:
            return None
        standing = Standing(float(np.mean(self.pool)), float(np.std(self.pool)) / math.sqrt(len(self.pool)))
        self.pool.clear()
        best = self.best
        if best is not None and self._collapsed(standing, self.good[best]):
            return best
        before = self.good.pop(version, standing)
        self.good[version] = max(before, standing, key=_sure)  # once good stays the measure, also of itself
        kept = {self.best, *list(self.good)[-self.memory :]}
        self.good = {v: earned for v, earned in self.good.items() if v in kept}
        return None

    @property
    def best(self) -> int | None:
        """The version with the highest mean reward less its standard error."""
        return max(self.good, key=lambda v: _sure(self.good[v]), default=None)

    def keep_only(self, versions: Collection[int]) -> None:
        """Drop all versions but these: a run cannot go back to one whose weights are gone."""
        self.good = {version: standing for version, standing in self.good.items() if version in versions}

    def rolled_back(self, target: int, served: int) -> None:
        """`target` is served again under the number `served`, and keeps its standing."""
        self.pool.clear()
        if target in self.good:
            self.good[served] = self.good.pop(target)

    def forget(self) -> None:
        """Begin anew: a person has chosen another version."""
        self.good.clear()
        self.pool.clear()

    def _collapsed(self, now: Standing, best: Standing) -> bool:
        return not best.mean - now.mean <= self.margin + 3 * math.hypot(now.error, best.error)


def _sure(earned: Standing) -> float:
    return earned.mean - earned.error
