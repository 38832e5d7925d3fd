"""The average of what several runs have changed, and the step towards it.

Each run i has changed the last average by d_i and has learned from n_i samples. With g = -sum n_i d_i / sum n_i and
Nesterov's momentum m (DiLoCo, arXiv 2311.08105: SGD over the averages, with a rate of 0.7 and a momentum of 0.9):

    m <- mu m + g;  theta <- theta - rate (g + mu m)

With rate 1 and mu 0 that is federated averaging (McMahan et al., arXiv 1602.05629). What AdamW's moments say of the
gradient is averaged with the same weights, where runs tell it (Local Adam, arXiv 2409.13155).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trainer.state import Arrays, GradientMeans


@dataclass(frozen=True)
class Average:
    """Where a round ends, and the next one begins."""

    weights: Arrays
    momentum: Arrays
    means: GradientMeans = field(default_factory=GradientMeans)  # of the gradients; empty where runs keep their moments


@dataclass(frozen=True)
class Learned:
    """What one run has changed since the last average, and from how many samples."""

    delta: Arrays
    samples: int
    means: GradientMeans = field(default_factory=GradientMeans)  # empty: it does not tell


def usable(learned: Learned, like: Arrays) -> bool:
    """Whether a change, and its means if it has some, are of this adapter, and every number is one to go on from."""
    first, second = learned.means.first, learned.means.second
    told = [learned.delta, first, second] if first or second else [learned.delta]
    return all(_fits(arrays, like) for arrays in told) and all((value >= 0).all() for value in second.values())


def _fits(arrays: Arrays, like: Arrays) -> bool:
    same = {name: value.shape for name, value in arrays.items()} == {name: value.shape for name, value in like.items()}
    return same and all(np.isfinite(value).all() for value in arrays.values())


def averaged(last: Average, runs: Sequence[Learned], rate: float, momentum: float) -> Average:
    """The next average. In fp64, so that the order of runs matters little."""
    samples = [run.samples for run in runs]
    deltas = _mean([run.delta for run in runs], samples)
    weights: Arrays = {}
    moved: Arrays = {}
    for name, value in last.weights.items():
        pulled = -deltas[name]
        before = last.momentum[name].astype(np.float64) if name in last.momentum else np.zeros(value.shape)
        now = momentum * before + pulled
        moved[name] = now.astype(np.float32)
        weights[name] = (value.astype(np.float64) - rate * (pulled + momentum * now)).astype(np.float32)
    return Average(weights, moved if momentum else {}, _means(runs))


def _means(runs: Sequence[Learned]) -> GradientMeans:
    """Of the runs that tell theirs."""
    told = [run for run in runs if run.means.first]
    if not told:
        return GradientMeans()
    samples = [run.samples for run in told]
    first, second = (
        {name: value.astype(np.float32) for name, value in _mean(arrays, samples).items()}
        for arrays in ([run.means.first for run in told], [run.means.second for run in told])
    )
    return GradientMeans(first, second)


def _mean(arrays: Sequence[Arrays], samples: Sequence[int]) -> dict[str, npt.NDArray[np.float64]]:
    """Weighted by samples; evenly where nobody has any."""
    total = sum(samples)
    shares = [each / total if total else 1 / len(samples) for each in samples]
    weighted = list(zip(shares, arrays, strict=True))
    return {name: np.sum([share * each[name].astype(np.float64) for share, each in weighted], 0) for name in arrays[0]}
