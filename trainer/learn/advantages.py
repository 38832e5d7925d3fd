"""Generalized advantage estimation (Schulman et al., arXiv 1506.02438), and a teacher's verdicts as advantages.

Shape suffixes: T steps, N copies, B rows.
"""

from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from trainer.learn.options import TeachingOptions

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
_ROUNDED = 1e-13  # of a sum of squares in fp64


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


def of_tokens(rewards_B: Floats, values_BT: Floats, mask_BT: Flags, discount: float, decay: float) -> Floats:
    """[B, T]: of the tokens in the mask, in their order; a row's reward comes with the last of them. Elsewhere 0.

    What stands between them (the answers of tools) takes no step: the next state is what the next token is drawn in.
    """
    order_BT = np.argsort(~mask_BT, axis=1, kind="stable")  # what is in the mask first
    ordered_TB = np.take_along_axis(np.where(mask_BT, values_BT, 0.0), order_BT, axis=1).T.astype(np.float32)
    places_T1, lengths_B = np.arange(len(ordered_TB))[:, None], mask_BT.sum(axis=1)
    rewards_TB = np.where(places_T1 == lengths_B - 1, rewards_B, 0.0).astype(np.float32)
    ended_TB = places_T1 >= lengths_B - 1
    found_TB = advantages(rewards_TB, ordered_TB, ended_TB, np.zeros_like(rewards_B), discount, decay)
    found_BT = np.zeros(mask_BT.shape, np.float32)
    np.put_along_axis(found_BT, order_BT, found_TB.T, axis=1)
    return np.where(mask_BT, found_BT, np.float32(0.0))


@dataclass(frozen=True)
class ValueSums:
    """Over tokens, of what a value head is compared with; those of parts add up."""

    tokens: float = 0.0
    advantages: float = 0.0  # which are what the values were wrong by
    squared_advantages: float = 0.0
    returns: float = 0.0  # what the values should have been
    squared_returns: float = 0.0

    @classmethod
    def of(cls, advantages_N: Floats, returns_N: Floats) -> "ValueSums":
        """Sums over some tokens, whose advantages and returns have shape [N]."""
        found, wanted = advantages_N.astype(np.float64), returns_N.astype(np.float64)
        sums = (found.sum(), np.square(found).sum(), wanted.sum(), np.square(wanted).sum())
        return cls(float(len(found)), *map(float, sums))

    def plus(self, more: "ValueSums") -> "ValueSums":
        """Sums over the tokens of both."""
        return ValueSums(*(own + other for own, other in zip(astuple(self), astuple(more), strict=True)))

    @property
    def finite(self) -> bool:
        """True if every sum is finite."""
        return bool(np.isfinite(astuple(self)).all())

    @property
    def mean(self) -> float:
        """Mean of the advantages; 0 without tokens."""
        return self.advantages / self.tokens if self.tokens else 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of the advantages."""
        return float(np.sqrt(self._variance(self.advantages, self.squared_advantages)))

    @property
    def explained(self) -> float:
        """Explained variance: 1 - Var(advantages) / Var(returns); 0 when all returns are equal."""
        variance = self._variance(self.returns, self.squared_returns)
        return 1 - self._variance(self.advantages, self.squared_advantages) / variance if variance else 0.0

    def _variance(self, total: float, squares: float) -> float:
        """0 where it is no more than the squares are rounded by."""
        if not self.tokens:
            return 0.0
        mean = squares / self.tokens
        variance = mean - (total / self.tokens) ** 2
        return 0.0 if variance <= _ROUNDED * mean else variance


def explained(values: Floats, returns: Floats) -> float:
    """The share of the returns' variance that the values explain: 1 all of it, 0 none, below 0 less than a constant."""
    variance = float(np.var(returns, dtype=np.float64))
    return 1 - float(np.var(returns - values, dtype=np.float64)) / variance if variance else 0.0


def taught_advantages(
    advantage_B: npt.NDArray[np.float32], taught_BT: npt.NDArray[np.float32], options: TeachingOptions
) -> npt.NDArray[np.float32]:
    """Advantages [B, T] of samples that a teacher has scored: r A + c (log pi_teacher - log mu), `taught_BT` the
    difference in parentheses. Its mean over what mu draws is the negative reverse KL, token by token: on-policy
    distillation, arXiv 2306.13649 and 2306.08543, as a policy gradient without a discount.
    """
    found_BT: npt.NDArray[np.float32] = options.rewards * advantage_B[:, None] + options.coefficient * taught_BT
    return found_BT
