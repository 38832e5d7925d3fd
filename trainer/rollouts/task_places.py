"""Difficulty of the next tasks: places in the task set, from 0 (the easiest) to 1."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WIDTH = 0.1  # of the task set: how far from the wanted difficulty a task is still drawn often
KINDS = 16  # at most
SMALLEST = 1e-6  # below it a batch has no task near the wanted difficulty
_GAIN = 2.0  # AdaRFT's alpha

Places = npt.NDArray[np.float64]


def places_of(difficulties: Sequence[float]) -> Places:
    """The place of each task in the task set; equally hard tasks share the middle of theirs."""
    _, level, counts = np.unique(np.asarray(difficulties, np.float64), return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - counts / 2
    return np.asarray(middle[level] / len(difficulties))


def kinds_of(places: Places) -> npt.NDArray[np.int64]:
    """Stratum of each task: its level, where there are few; else one of equal parts of the task set."""
    levels, level = np.unique(places, return_inverse=True)
    return np.asarray(level if len(levels) <= KINDS else np.minimum(places * KINDS, KINDS - 1), np.int64)


class WantedDifficulty:
    """The wanted difficulty, as a place; it follows the rewards of the tasks near it, as AdaRFT's (arXiv 2504.05520).

    Where they earn more than the target the next ones are harder, where they earn less they are easier.
    """

    def __init__(self, places: Places, target: float, pace: float) -> None:
        self.places = places
        self._target, self._pace = target, pace
        self.place = float(places.min())

    def weights(self) -> Places:
        """1 for the nearest tasks."""
        away = np.square((self.places - self.place) / WIDTH) / 2
        return np.asarray(np.exp(away.min() - away))

    def follow(self, tasks: Sequence[int], shares: Sequence[float]) -> None:
        """Count a train step on these tasks; the farther a task is from the wanted place, the less it weighs."""
        near = self.weights()[list(tasks)]
        if near.sum() < SMALLEST:
            return
        earned = float(near @ np.asarray(shares) / near.sum())
        moved = self.place + self._pace * math.tanh(_GAIN * (earned - self._target))
        self.place = min(float(self.places.max()), max(float(self.places.min()), moved))
