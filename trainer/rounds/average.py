"""The average of what several runs have changed, and the step towards it.

Each run i has changed the last average by d_i and has learned from n_i samples. With g = -sum n_i d_i / sum n_i and
Nesterov's momentum m (DiLoCo, arXiv 2311.08105: SGD over the averages, with a rate of 0.7 and a momentum of 0.9):

    m <- mu m + g;  theta <- theta - rate (g + mu m)

With rate 1 and mu 0 that is federated averaging (McMahan et al., arXiv 1602.05629).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.state import Arrays


@dataclass(frozen=True)
class Average:
    """Where a round ends, and the next one begins."""

    weights: Arrays
    momentum: Arrays


def usable(delta: Arrays, like: Arrays) -> bool:
    """Whether a change is of this adapter, and every number is finite."""
    same = {name: value.shape for name, value in delta.items()} == {name: value.shape for name, value in like.items()}
    return same and all(np.isfinite(value).all() for value in delta.values())


def averaged(last: Average, deltas: Sequence[tuple[Arrays, int]], rate: float, momentum: float) -> Average:
    """The next average; each change with its number of samples. In fp64, so that the order of runs matters little."""
    total = sum(samples for _, samples in deltas)
    shares = [samples / total if total else 1 / len(deltas) for _, samples in deltas]
    weights: Arrays = {}
    moved: Arrays = {}
    for name, value in last.weights.items():
        pulled = -sum(share * delta[name].astype(np.float64) for share, (delta, _) in zip(shares, deltas, strict=True))
        before = last.momentum[name].astype(np.float64) if name in last.momentum else np.zeros(value.shape)
        now = momentum * before + pulled
        moved[name] = now.astype(np.float32)
        weights[name] = (value.astype(np.float64) - rate * (pulled + momentum * now)).astype(np.float32)
    return Average(weights, moved if momentum else {})
