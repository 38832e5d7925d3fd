"""A split: requests for an adapter go to several of its versions, by shares that rewards move, until a verdict.

Shares are those of Thompson sampling: a version gets requests as often as it is the best one by what is known. What is
known of a version is a normal distribution of its mean reward, from the count, mean and variance of its own rewards and
one reward's worth of all versions' together: so rewards may have any scale, and what nobody has judged yet is tried.
The shares to begin with are prior odds, and no version falls below the floor.

Plain arithmetic: whoever knows the counts comes to the same shares and to the same verdict.
"""

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

MOST_VERSIONS = 8
MOST_REWARDS = 20_000  # until the verdict: so many ids of answers are remembered
MOST_REWARD = 1e9  # further from 0 no reward is counted

Outcome = Literal["promoted", "rolled_back", "kept"]

_OWN = 1.0  # rewards' worth of all versions' mean, for each version
_SPREAD = 4.0  # rewards' worth of all versions' variance
_NOISE = 1e-24  # variance, as a part of the squared mean, that rounding may make
_TINY = 1e-200  # below it arithmetic loses figures
_STEPS = [step / 10 for step in range(-50, 51)]  # of the integral over one version's mean, in its errors


class Arm(msgspec.Struct, frozen=True):
    """The version that a split has chosen for a request."""

    split: str  # its id
    version: int


class Split(msgspec.Struct, frozen=True):
    """Which versions get which shares, and when it ends."""

    versions: tuple[int, ...]
    weights: tuple[float, ...]  # of the versions: shares to begin with, 1 together
    latest: int  # one of them; a split is over when the adapter's latest version is another one
    auto: bool = True  # whether rewards move the shares
    floor: float = 0.01  # share that each version keeps
    verdict_after: int = 400  # rewards
    confidence: float = 0.95  # that another version is better, for it to become the latest
    tenant: str = ""  # the adapter's owner: whose requests it is about


class Rewards(msgspec.Struct, frozen=True):
    """What a version has earned."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared differences from the mean


class Verdict(msgspec.Struct, frozen=True):
    """How a split has ended."""

    winner: int
    outcome: Outcome
    detail: str
    at_ms: int = 0


class Belief(msgspec.Struct, frozen=True):
    """A normal distribution of a version's mean reward."""

    mean: float
    error: float


def beliefs(split: Split, earned: Mapping[int, Rewards]) -> list[Belief] | None:
    """What is known of each version; None while all rewards are equal, or there are none."""
    rewards = [earned.get(version, Rewards()) for version in split.versions]
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


def shares(split: Split, earned: Mapping[int, Rewards]) -> tuple[float, ...]:
    """The share of each version; 1 together."""
    if not split.auto:
        return split.weights
    known = beliefs(split, earned)
    chances = list(split.weights)
    if known is not None:
        chances = [w * c for w, c in zip(split.weights, best_chances(known), strict=True)]
    if sum(chances) < _TINY:  # each one's weight or chance is too small for a number
        chances = list(split.weights)
    total = sum(chances)
    left = 1 - split.floor * len(chances)
    return tuple(split.floor + left * chance / total for chance in chances)


def best_chances(known: list[Belief]) -> list[float]:
    """For each version, how likely it is the best one."""
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
    """How likely the first has the higher mean."""
    return _below((one.mean - other.mean) / math.hypot(one.error, other.error))


def winner(split: Split, earned: Mapping[int, Rewards]) -> tuple[int, str]:
    """The version that is to be the latest, and why: the best one if it is surely better than the latest."""
    known = beliefs(split, earned)
    count = sum(each.count for each in earned.values())
    if known is None:
        return split.latest, f"{count} rewards tell the versions not apart"
    now = known[split.versions.index(split.latest)]
    best, version = max(zip(known, split.versions, strict=True), key=lambda pair: pair[0].mean)
    if version == split.latest:
        return version, f"after {count} rewards, the latest version is worth the most, about {now.mean:.4g}"
    chance = better(best, now)
    said = (
        f"after {count} rewards, version {version} is worth about {best.mean:.4g}, version {split.latest} about "
        f"{now.mean:.4g}: better with probability {chance:.4f}"
    )
    return (version if chance >= split.confidence else split.latest), said


def _below(z: float) -> float:
    """The standard normal distribution."""
    return 0.5 * math.erfc(-z / math.sqrt(2))
