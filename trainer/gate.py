"""What an adapter version must pass before it may become the latest, and when it must step down again.

Every check has a name, which stands in the log and in the version's manifest, and says what it saw. All of them are
pure: numbers in, `GateCheck` out. What has to be computed with the model stands in trainer/probes.py.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.adapters import GateCheck
from trainer.state import Arrays


@dataclass(frozen=True)
class GateLimits:
    """The bounds of the checks."""

    max_update_rms: float = 0.05  # of one train step, over all adapter parameters
    max_probe_kl: float = 0.5  # nats per token, from the last good version, on fixed prompts
    max_parity: float = 0.1  # mean |log-probability in a worker - in the trainer|
    reward_margin: float = 0.15  # how far held-out or new rewards may fall below the last good version's
    min_rewards: int = 64  # trajectories before a version is judged by its rewards


def passed(checks: Iterable[GateCheck]) -> bool:
    """Whether a version may be served."""
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


def update_norm(rms: float, limit: float) -> GateCheck:
    """The train step moved the parameters by no more than the bound."""
    return _at_most("update_norm", rms, limit)


def probe_kl(kl: float, limit: float) -> GateCheck:
    """On fixed prompts the version stays near the last good one."""
    return _at_most("probe_kl", kl, limit)


def reload_parity(difference: float, limit: float) -> GateCheck:
    """A worker that loaded the version computes what the trainer computes."""
    return _at_most("reload_parity", difference, limit)


def reward_floor(reward: float, good: float | None, margin: float) -> GateCheck:
    """The held-out reward is not below the last good version's by more than the margin."""
    if good is None:
        return GateCheck("reward_floor", math.isfinite(reward), f"{reward:.4g}")
    return GateCheck("reward_floor", reward >= good - margin, f"{reward:.4g}, floor {good - margin:.4g}")


def _at_most(name: str, value: float, limit: float) -> GateCheck:
    return GateCheck(name, math.isfinite(value) and value <= limit, f"{value:.4g}, bound {limit:.4g}")


@dataclass
class RewardWatch:
    """Decides on a rollback from the rewards that each served version earns.

    A version is judged once it has `min_rewards`. It is good while its mean is at most `margin` below the best mean of
    the last `memory` good versions (the best, so that a slow decline is seen too); else `judge` names the version to
    go back to: the best of them.
    """

    margin: float
    min_rewards: int
    memory: int = 5
    good: dict[int, float] = field(default_factory=dict)  # version -> mean reward, oldest first
    open: dict[int, tuple[int, float]] = field(default_factory=dict)  # version -> count and sum so far

    def add(self, version: int, rewards: Sequence[float]) -> int | None:
        """Rewards of trajectories that `version` sampled; the version to roll back to, if it has to be."""
        count, total = self.open.get(version, (0, 0.0))
        count, total = count + len(rewards), total + float(sum(rewards))
        self.open[version] = (count, total)
        if count < self.min_rewards:
            return None
        mean = total / count
        best = max(self.good, key=lambda v: self.good[v], default=None)
        if best is not None and version not in self.good and not mean >= self.good[best] - self.margin:
            return best
        if version not in self.good and len(self.good) >= self.memory:
            del self.good[next(iter(self.good))]
        self.good[version] = mean
        for old in [v for v in self.open if v < version - self.memory]:
            del self.open[old]
        return None

    def rolled_back(self) -> None:
        """Forget versions that are not known to be good; the next ones start from an old one."""
        self.open.clear()
