"""Recent rewards of each task, and the weight of its next group.

A group teaches by the differences between its samples: nothing when all or none of them solve the task, most when about
half do (the variance of a reward of 0 or 1 is p (1 - p)). So a task's weight is highest where its mean reward is the
target, and falls to both sides. A task that was never tried has the highest weight, unless tasks of its kind were: what
they have earned is then expected of it, too, and a large task set is known after a few train steps.

Invariant. A group that started earlier than the task's last known one changes nothing, however late it comes.
"""

from dataclasses import dataclass
from math import exp

import numpy as np
import numpy.typing as npt

MEMORY = 0.5  # of what a task has earned, when it is tried again: the latest groups count most
SURE = 0.05  # this close to 1 a task counts as solved, this close to 0 as hopeless
KIND_COUNTS = 4.0  # samples: how much what its kind has earned counts for a task
KIND_MEMORY = 512.0  # samples that are remembered of a kind
_SEEN = np.dtype([("task", "<i8"), ("last", "<i8"), ("earned", "<f8"), ("tried", "<f8")])


@dataclass(frozen=True)
class TaskShares:
    """Shares of all tasks by what they have earned; the remaining ones have earned something in between."""

    solved: float
    hopeless: float
    unseen: float


class TaskPool:
    """All tasks, by number. Memory: 32 bytes a task; 32 bytes in a checkpoint for each that was tried.

    `kinds`: the kind of each task, as a number from 0; tasks of one kind are expected to earn alike.
    """

    def __init__(self, tasks: int, target: float, kinds: npt.NDArray[np.int64] | None = None) -> None:
        self._target = target
        self._kinds = kinds
        count = 0 if kinds is None else int(kinds.max()) + 1
        self._kind_earned, self._kind_tried = np.zeros(count), np.zeros(count)
        self._earned = np.zeros(tasks)
        self._tried = np.zeros(tasks)  # samples, the earlier ones counted for less
        self._last = np.full(tasks, -1, np.int64)  # index of the group that was counted last

    def __len__(self) -> int:
        return len(self._tried)

    def count(self, task: int, index: int, share: float, samples: int) -> None:
        """A group of the task has earned `share` of what can be earned."""
        if index <= self._last[task]:
            return
        self._last[task] = index
        self._earned[task] = MEMORY * self._earned[task] + share * samples
        self._tried[task] = MEMORY * self._tried[task] + samples
        if self._kinds is not None:
            kind, kept = self._kinds[task], exp(-samples / KIND_MEMORY)
            self._kind_earned[kind] = kept * self._kind_earned[kind] + share * samples
            self._kind_tried[kind] = kept * self._kind_tried[kind] + samples

    def weights(self) -> npt.NDArray[np.float64]:
        """Weight of the next group of each task: 1 where its mean reward is the target, and never 0.

        The mean is taken together with one sample that earned the target, or with some that earned what the kind of the
        task has earned: three of three are no proof of a solved task.
        """
        expected, counts = np.full(len(self), self._target), 1.0
        if self._kinds is not None:
            of_kinds = (self._kind_earned + self._target) / (self._kind_tried + 1)
            expected, counts = of_kinds[self._kinds], KIND_COUNTS
        share = (self._earned + counts * expected) / (self._tried + counts)
        low, high = 2 * self._target, 2 * (1 - self._target)
        return np.asarray((share / self._target) ** low * ((1 - share) / (1 - self._target)) ** high)

    def shares(self) -> TaskShares:
        """Shares of tasks that are solved, hopeless and untried."""
        tried = self._tried > 0
        share = self._earned[tried] / self._tried[tried]
        solved, hopeless = np.count_nonzero(share >= 1 - SURE), np.count_nonzero(share <= SURE)
        return TaskShares(float(solved / len(self)), float(hopeless / len(self)), float(1 - tried.mean()))

    def packed(self) -> tuple[bytes, list[tuple[float, float]]]:
        """State for a checkpoint: the tried tasks, and the reward of each kind with its number of samples."""
        (tried,) = np.nonzero(self._tried)
        seen = np.empty(len(tried), _SEEN)
        seen["task"], seen["last"] = tried, self._last[tried]
        seen["earned"], seen["tried"] = self._earned[tried], self._tried[tried]
        return seen.tobytes(), list(zip(self._kind_earned.tolist(), self._kind_tried.tolist(), strict=True))

    def unpack(self, packed: bytes, kinds: list[tuple[float, float]]) -> None:
        """Continue where a checkpoint stood."""
        for kind, (earned, tried) in enumerate(kinds):
            self._kind_earned[kind], self._kind_tried[kind] = earned, tried
        seen = np.frombuffer(packed, _SEEN)
        task = seen["task"]
        self._last[task], self._earned[task], self._tried[task] = seen["last"], seen["earned"], seen["tried"]
