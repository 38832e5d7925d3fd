"""Generalized advantage estimation (Schulman et al., arXiv 1506.02438). Shape suffixes: T steps, N copies."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


def advantages(
    rewards_TN: Floats, values_TN: Floats, ended_TN: Flags, next_N: Floats, discount: float, decay: float
) -> Floats:
    r"""A_t = delta_t + discount decay A_{t+1}, delta_t = r_t + discount V_{t+1} - V_t; nothing follows an end.

    `next_N`: values of what was observed after the last step. Where an episode was cut off, its last reward has the
    value of what it ended with added to it, times the discount.
    """
    found_TN = np.zeros(rewards_TN.shape, np.float64)
    follows_N, next_value_N = np.zeros(len(next_N)), next_N.astype(np.float64)
    for t in reversed(range(len(rewards_TN))):
        goes_on_N = ~ended_TN[t]
        delta_N = rewards_TN[t] + discount * next_value_N * goes_on_N - values_TN[t]
        follows_N = delta_N + discount * decay * follows_N * goes_on_N
        found_TN[t], next_value_N = follows_N, values_TN[t].astype(np.float64)
    return found_TN.astype(np.float32)


def explained(values: Floats, returns: Floats) -> float:
    """The share of the returns' variance that the values explain: 1 all of it, 0 none, below 0 less than a constant."""
    variance = float(np.var(returns))
    return 1 - float(np.var(returns - values)) / variance if variance else 0.0
