"""The settings of a curriculum: part of those of `mlx_parallm_train`."""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

from shared.errors import SetupError
from trainer.rollouts.difficulty import DifficultyField

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


_OF_CURRICULA = ("curriculum_floor", "curriculum_target", "curriculum_hopeless", "curriculum_solved")
_BY_DIFFICULTY = ("curriculum_pace",)
_OF_FIELDS = ("curriculum_field", "curriculum_levels")


class CurriculumSettings(BaseModel):
    """Settings of the choice of tasks."""

    curriculum: CurriculumName = Field(
        default="uniform",
        description="which tasks to learn from: all alike; by reward, those that are neither solved nor hopeless; by "
        "difficulty, harder ones as rewards rise",
    )
    curriculum_floor: float = Field(
        default=0.1, ge=0, le=1, description="share of groups whose task is drawn evenly from all"
    )
    curriculum_target: float = Field(
        default=0.5,
        ge=0.05,
        le=0.95,
        description="difficulty of the tasks to learn from, as their mean reward; 0: hopeless, 1: solved",
    )
    curriculum_hopeless: float = Field(
        default=0.0, allow_inf_nan=False, description="mean reward of a task that is never solved"
    )
    curriculum_solved: float = Field(
        default=1.0, allow_inf_nan=False, description="mean reward of a task that is always solved"
    )
    curriculum_pace: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="largest share of the task set by which one train step moves the difficulty",
    )
    curriculum_field: str = Field(
        default="",
        description="field of a data set's lines, or of their metadata, that states how hard a task is; by "
        "reward, tasks with the same value are expected to earn alike; default: none by reward, "
        "difficulty by difficulty",
    )
    curriculum_levels: tuple[str, ...] = Field(
        default=(), description="values of that field from the easiest to the hardest, where they are not numbers"
    )

    def curriculum_options(self, seed: int) -> CurriculumOptions:
        """Options of the curriculum that the settings ask for."""
        return CurriculumOptions(
            self.curriculum,
            self.curriculum_floor,
            self.curriculum_target,
            self.curriculum_hopeless,
            self.curriculum_solved,
            self.curriculum_pace,
            seed,
        )

    def difficulty_field(self) -> DifficultyField | None:
        """Field of the data set's lines that states the difficulty, if they must have one."""
        by_field = self.curriculum == "difficulty" or self.curriculum_field
        return DifficultyField(self.curriculum_field or "difficulty", self.curriculum_levels) if by_field else None

    def check_curriculum(self, task: str, source: str, atropos_url: str) -> None:
        """SetupError when settings contradict each other, or others choose the tasks in place of this run."""
        fields = CurriculumSettings.model_fields
        given = [
            name
            for name in (*_OF_CURRICULA, *_OF_FIELDS, *_BY_DIFFICULTY)
            if getattr(self, name) != fields[name].default
        ]
        if self.curriculum == "uniform" and given:
            flag = "difficulty" if given[0] in _BY_DIFFICULTY else "reward or difficulty"
            raise SetupError(f"{_flag(given[0])} has no use without --curriculum {flag}")
        if self.curriculum == "reward" and given and given[-1] in _BY_DIFFICULTY:
            raise SetupError(f"{_flag(given[-1])} has no use without --curriculum difficulty")
        if self.curriculum == "reward" and self.curriculum_levels and not self.curriculum_field:
            raise SetupError("--curriculum-levels goes with a --curriculum-field")
        self._check_difficulty(task)
        if self.curriculum != "uniform" and (atropos_url or source not in ("prompts", "both")):
            others = "--atropos-url" if atropos_url else f"--source {source}"
            raise SetupError(f"--curriculum chooses among the run's own tasks: with {others} others do")
        if self.curriculum_hopeless >= self.curriculum_solved:
            bounds = f"{self.curriculum_hopeless:g} has to be below --curriculum-solved {self.curriculum_solved:g}"
            raise SetupError(f"--curriculum-hopeless {bounds}")

    def curriculum_cautions(self, *, evaluates: bool) -> list[str]:
        """Warnings of settings that are allowed and seldom meant, for the log."""
        if self.curriculum == "uniform" or self.curriculum_floor or evaluates:
            return []
        why = "nothing compares one version with another, so none is taken back for its rewards"
        return [f"curriculum_floor 0 without evaluate_every: {why}"]

    def _check_difficulty(self, task: str) -> None:
        if task == "arithmetic" and self.difficulty_field() is not None:
            raise SetupError("the sums of --task arithmetic have no difficulty to choose by: give a data set")
        if ":" in task and (self.curriculum_levels or self.curriculum_field):
            raise SetupError(
                "--curriculum-field and --curriculum-levels are of data sets: an environment's `reset` gives "
                "`Observation(difficulty=...)`"
            )
        if len(set(self.curriculum_levels)) < len(self.curriculum_levels):
            raise SetupError("--curriculum-levels names a level twice")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
