"""A split: requests for an adapter go to several of its versions, by shares that rewards move, until a verdict.

Shares are those of Thompson sampling: a version gets requests as often as it is the best one by what is known. What is
known of a version is a normal distribution of its mean reward, from the count, mean and variance of its own rewards and
one reward's worth of all versions' together: so rewards may have any scale, and what nobody has judged yet is tried.
The shares to begin with are prior odds. No version falls below the floor, nor far, before it has as many rewards as a
verdict asks for.

Plain arithmetic: whoever knows the counts comes to the same shares and to the same verdict.
"""

import functools
import math
from collections.abc import Mapping
from typing import Literal

import msgspec

MOST_VERSIONS = 8
LEAST_REWARDS = 10  # of a version, and of the latest, for it to become the latest
MOST_REWARDS = 20_000  # until the verdict: so many ids of answers are remembered
MOST_REWARD = 1e9  # further from 0 no reward is counted

ArmKind = Literal["latest", "candidate"]
Outcome = Literal["promoted", "rolled_back", "kept"]

_OWN = 1.0  # weight, in rewards, of all versions' mean in each version's
_SPREAD = 4.0  # weight, in rewards, of all versions' variance
_UNTRIED = 0.15  # share that a version keeps, unless it began with less, until it has LEAST_REWARDS
_ROOM = 0.8  # part of what floors leave that such shares may take
_NOISE = 1e-24  # variance, as a part of the squared mean, that rounding may make
_TINY = 1e-200  # below it arithmetic loses figures
_STEPS = [step / 10 for step in range(-50, 51)]  # of the integral over one version's mean, in its errors


class Arm(msgspec.Struct, frozen=True):
    """The version that a split has chosen for a request."""

    split: str  # its id
    version: int


class Split(msgspec.Struct, frozen=True):
    """Versions and their shares, and the end of the split."""

    versions: tuple[int, ...]
    weights: tuple[float, ...]  # of the versions: shares to begin with, 1 together
    latest: int  # one of them; a split is over when the adapter's latest version is another one
    auto: bool = True  # whether rewards move the shares
    floor: float = 0.01  # share that each version keeps
    verdict_after: int = 400  # rewards
    confidence: float = 0.95  # that another version is better, for it to become the latest
    tenant: str = ""  # the adapter's owner: whose requests it is about


class RewardSums(msgspec.Struct, frozen=True):
    """Running sums of the rewards of one version."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared differences from the mean


class SplitVerdict(msgspec.Struct, frozen=True):
    """Result of a split that has ended."""

    winner: int
    outcome: Outcome
    detail: str
    at_ms: int = 0


class Belief(msgspec.Struct, frozen=True):
    """A normal distribution of a version's mean reward."""

    mean: float
    error: float


def beliefs(split: Split, earned: Mapping[int, RewardSums]) -> list[Belief] | None:
    """Posterior of each version's mean reward; None while all rewards are equal, or there are none."""
    rewards = [earned.get(version, RewardSums()) for version in split.versions]
    count = sum(each.count for each in rewards)
    if not count:
        return None
    mean = sum(each.count * each.mean for each in rewards) / count
    variance = sum(each.squares + each.count * (each.mean - mean) ** 2 for each in rewards) / count
    if variance <= max(_NOISE * mean * mean, _TINY):
        return None
    found = []
    for each in rewards:
        own = (each.squares + _SPREAD * variance) / (each.count + _SPREAD)
        centre = (each.count * each.mean + _OWN * mean) / (each.count + _OWN)
        found.append(Belief(centre, math.sqrt(own / (each.count + _OWN))))
    return found


def shares(split: Split, earned: Mapping[int, RewardSums]) -> tuple[float, ...]:
    """The share of each version; 1 together."""
    if not split.auto:
        return split.weights
    return _shares(split, tuple(earned.get(version, RewardSums()) for version in split.versions))


@functools.lru_cache(maxsize=256)
def _shares(split: Split, rewards: tuple[RewardSums, ...]) -> tuple[float, ...]:
    """Cached by their inputs: with many versions they take milliseconds, and are needed again and again."""
    earned = dict(zip(split.versions, rewards, strict=True))
    known = beliefs(split, earned)
    chances = list(split.weights)
    if known is not None:
        chances = [w * c for w, c in zip(split.weights, best_chances(known), strict=True)]
    if sum(chances) < _TINY:  # each one's weight or chance is too small for a number
        chances = list(split.weights)
    least = [split.floor] * len(chances) if known is None else _least_shares(split, earned)
    left, total = 1 - sum(least), sum(chances)
    return tuple(low + left * chance / total for low, chance in zip(least, chances, strict=True))


def _least_shares(split: Split, earned: Mapping[int, RewardSums]) -> list[float]:
    """The floor, and more of it for versions that lack rewards for a verdict."""
    more = [
        max(0.0, min(_UNTRIED, weight) - split.floor)
        if earned.get(version, RewardSums()).count < LEAST_REWARDS
        else 0.0
        for version, weight in zip(split.versions, split.weights, strict=True)
    ]
    room = _ROOM * (1 - split.floor * len(more))
    return [split.floor + each * min(1.0, room / sum(more)) if each else split.floor for each in more]


def best_chances(known: list[Belief]) -> list[float]:
    """For each version, the probability that it is the best one."""
    if len(known) == 2:
        return [better(*known), better(*reversed(known))]
    found = []
    for i, one in enumerate(known):
        others = known[:i] + known[i + 1 :]
        found.append(
            sum(
                math.exp(-z * z / 2)
                * math.prod(_below((one.mean + z * one.error - other.mean) / other.error) for other in others)
                for z in _STEPS
            )
        )
    total = sum(found)
    return [chance / total for chance in found]


def better(one: Belief, other: Belief) -> float:
    """Probability that the first version has the higher mean."""
    return _below((one.mean - other.mean) / math.hypot(one.error, other.error))


def winner(split: Split, earned: Mapping[int, RewardSums]) -> tuple[int, str]:
    """The version that is to be the latest, and why.

    Of those that are surely better than the latest it is the one with the highest lower bound of its mean: one that has
    hardly been tried may have the highest mean by luck. Each comparison is a chance to err, so they share what
    `confidence` leaves.
    """
    known = beliefs(split, earned)
    count = sum(each.count for each in earned.values())
    if known is None:
        return split.latest, f"{count} rewards do not distinguish the versions"
    belief = dict(zip(split.versions, known, strict=True))
    now, others = belief[split.latest], [version for version in split.versions if version != split.latest]
    chances = {version: better(belief[version], now) for version in others}
    asked = 1 - (1 - split.confidence) / len(others)
    tried = {version for version, each in earned.items() if each.count >= LEAST_REWARDS}
    sure = [version for version in others if {version, split.latest} <= tried and chances[version] >= asked]
    best = max(sure or others, key=lambda version: belief[version].mean - belief[version].error)
    said = (
        f"after {count} rewards, version {best} earns about {belief[best].mean:.4g}, version {split.latest} about "
        f"{now.mean:.4g}: better with probability {chances[best]:.4f}, and {asked:.4g} is asked for"
    )
    if not {best, split.latest} <= tried:
        said += f", and {LEAST_REWARDS} rewards of each"
    return (best if sure else split.latest), said


def _below(z: float) -> float:
    """Distribution function of the standard normal distribution at z."""
    return 0.5 * math.erfc(-z / math.sqrt(2))
