"""What a curriculum may be told."""

from dataclasses import dataclass
from typing import Literal

CurriculumName = Literal["uniform", "reward", "difficulty"]


@dataclass(frozen=True)
class CurriculumOptions:
    """`uniform` is no curriculum: tasks follow one another, all equally often."""

    name: CurriculumName = "uniform"
    floor: float = 0.1  # share of groups whose task is drawn evenly from all
    target: float = 0.5  # mean reward of the tasks to be drawn, as a share of the way from `hopeless` to `solved`
    hopeless: float = 0.0  # mean reward of a task that is never solved
    solved: float = 1.0  # and of one that always is
    pace: float = 0.05  # by how much of the task set a train step may move the wanted difficulty
    seed: int = 0

    def share(self, reward: float) -> float:
        """A mean reward on the way from hopeless, 0, to solved, 1."""
        return min(1.0, max(0.0, (reward - self.hopeless) / (self.solved - self.hopeless)))
