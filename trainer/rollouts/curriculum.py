"""Draws the task of each new group, and records what was drawn and earned.

Invariants.
- A draw depends on the run's seed, the group's index, what train steps have counted, and the tasks that are under way.
  So a run that was resumed draws as one that was never stopped, and with K = 0 the same run draws the same tasks.
- Only groups that a train step has consumed count. What is too old, or was sampled by a version that collapsed, does
  not. A group that could not be played at all counts as hopeless, or it would be drawn again and again, and so does
  one that could not be scored; but where no group of a train step was, the tasks are not to blame, and nothing counts.
- Evaluations ask the held-out tasks themselves, never this: nothing that they earn can influence a draw.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from shared.seeds import derived_seed
from trainer.rollouts.curriculum_settings import CurriculumOptions
from trainer.rollouts.task_places import Places, WantedDifficulty, kinds_of
from trainer.rollouts.task_pool import TaskPool
from trainer.state import CurriculumBooks, DrawnTask

_TRIES = 16  # draws of a task that is not under way, before those are left out by name


@dataclass(frozen=True)
class CurriculumFigures:
    """Figures of the curriculum in a train step's line; places are those of `difficulty.py`."""

    tasks_solved: float
    tasks_hopeless: float
    tasks_unseen: float
    tasks: tuple[int, ...] = ()  # of the batch
    difficulty: float | None = None  # mean place of the batch's tasks
    wanted_difficulty: float | None = None


class Curriculum:
    """Tasks 0 to `tasks` - 1. `places`: how hard each is; tasks of one place are of one kind."""

    def __init__(
        self, options: CurriculumOptions, tasks: int, places: Places | None = None, identity: str = ""
    ) -> None:
        self._options, self._identity = options, identity
        self._pool = TaskPool(tasks, options.target, None if places is None else kinds_of(places))
        self._places = places
        self._wanted: WantedDifficulty | None = None
        if places is not None and options.name == "difficulty":
            self._wanted = WantedDifficulty(places, options.target, options.pace)
        self._drawn: dict[int, DrawnTask] = {}  # by the group's index; groups that are neither consumed nor dropped
        self._sums: np.ndarray | None = None  # of the weights, up to each task
        self._tasks: tuple[int, ...] = ()  # of the last batch

    def restore(self, books: CurriculumBooks) -> bool:
        """Restore a checkpoint's state; False when it is of other tasks, and is left unused."""
        if books.identity != self._identity:
            return False
        self._drawn = dict(books.drawn)
        self._pool.unpack(books.seen, books.kinds)
        if self._wanted is not None and books.wanted is not None:
            self._wanted.place = books.wanted
        return True

    def books(self, pending: Collection[int]) -> CurriculumBooks:
        """State for a checkpoint, with the draws of the groups that are pending in it."""
        wanted = self._wanted.place if self._wanted is not None else None
        drawn = {index: self._drawn[index] for index in sorted(pending) if index in self._drawn}
        return CurriculumBooks(self._identity, drawn, *self._pool.packed(), wanted)

    def draw(self, index: int) -> None:
        """Choose the task of a group that starts now; one that has been chosen stays."""
        if index not in self._drawn:
            evenly = self._chance(index, "evenly") < self._options.floor
            task = int(self._chance(index, "task") * len(self._pool)) if evenly else self._by_weight(index)
            self._drawn[index] = DrawnTask(task, evenly)

    def drawn(self, index: int) -> DrawnTask:
        """The task of a group that is neither consumed nor dropped."""
        return self._drawn[index]

    def learned(self, indices: Sequence[int], rewards: Sequence[Sequence[float]]) -> None:
        """A train step has consumed these groups, with the rewards of each."""
        self._tasks = tuple(self._drawn.pop(index).task for index in indices)
        if not any(rewards):
            return
        shares = [self._options.share(float(np.mean(earned))) if earned else 0.0 for earned in rewards]
        for index, task, share, earned in zip(indices, self._tasks, shares, rewards, strict=True):
            self._pool.count(task, index, share, len(earned) or 1)
        if self._wanted is not None:
            scored = [at for at, earned in enumerate(rewards) if earned]
            self._wanted.follow([self._tasks[at] for at in scored], [shares[at] for at in scored])
        self._sums = None

    def failed(self, index: int) -> None:
        """The group could not be played."""
        self._pool.count(self._drawn.pop(index).task, index, 0.0, 1)
        self._sums = None

    def dropped(self, indices: Sequence[int]) -> None:
        """Nothing is learned from these groups, nor about their tasks."""
        for index in indices:
            self._drawn.pop(index, None)

    def figures(self) -> CurriculumFigures:
        """Figures after a train step."""
        shares, difficulty = self._pool.shares(), None
        if self._places is not None and self._tasks:
            difficulty = float(self._places[list(self._tasks)].mean())
        wanted = self._wanted.place if self._wanted is not None else None
        return CurriculumFigures(shares.solved, shares.hopeless, shares.unseen, self._tasks, difficulty, wanted)

    def _by_weight(self, index: int) -> int:
        """Draw a task that is not pending, while there is one."""
        if self._sums is None:
            self._sums = np.cumsum(self._weights())
        busy = {drawn.task for drawn in self._drawn.values()}
        for attempt in range(_TRIES):
            task = self._at(self._sums, self._chance(index, attempt))
            if task not in busy:
                return task
        weights = self._weights()
        if len(busy) < len(weights):
            weights[list(busy)] = 0.0
        return self._at(np.cumsum(weights), self._chance(index, "free"))

    def _weights(self) -> Places:
        return self._pool.weights() if self._wanted is None else self._wanted.weights()

    @staticmethod
    def _at(sums: Places, chance: float) -> int:
        return min(int(np.searchsorted(sums, chance * sums[-1], side="right")), len(sums) - 1)

    def _chance(self, index: int, what: int | str) -> float:
        """Even in [0, 1), the same each time."""
        return (derived_seed(self._options.seed, "curriculum", index, what) >> 10) / 2**53
