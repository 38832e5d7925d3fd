"""Requests of the trainer to a generator, and the results: the seam between training and the ring.

**request** n samples of one prompt · **group** the finished samples of one request, scored · **policy step** number of
train steps whose result is the current policy.

Invariant: within one start of a run, a request's id and seed follow from the group's index; asking again is asking the
same thing, and a source may answer with what it already has. After a restart the ids are new and the seeds the same.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from shared.images.refs import ImageRef
from shared.jobs import SamplingOverrides
from shared.trajectories import Trajectory
from trainer.state import CurriculumBooks


@dataclass(frozen=True)
class RolloutRequest:
    """n samples of one prompt, from the newest policy."""

    id: str
    prompt_ids: tuple[int, ...]
    n: int
    sampling: SamplingOverrides  # with a seed: sample s draws with a seed derived from it and s
    adapter: str  # a name (follows the latest version) or name@k (pinned)
    metadata: dict[str, Any] = field(default_factory=dict)
    has_next_turn: bool = False  # another request may begin with this prompt and a sample of it
    images: tuple[ImageRef, ...] = ()  # of the prompt
    image_token: int = 0  # that stands for each vector of them
    files: dict[bytes, bytes] = field(default_factory=dict, repr=False)  # of the images, by hash


@dataclass(frozen=True)
class TeacherRequest:
    """A completion whose log-probabilities a teacher is to give."""

    id: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    teacher: str  # an adapter or a version of it; "": the base that the scorer's workers serve


class Scorer(Protocol):
    """A model that gives log-probabilities of completions as a teacher."""

    async def score(self, request: TeacherRequest) -> tuple[float, ...]:
        """The model's own log-probability of each completion token. ParallmError when there is none."""


class RolloutSource(Protocol):
    """Generates. In the product every token of it comes through the queue; tests have a source of their own."""

    async def generate(self, request: RolloutRequest) -> list[Trajectory]:
        """All n samples, in order of `sample_index`; a sample that failed has `error` set.

        Cancelling the call cancels the sequences. Raises ParallmError when nothing can be generated at all.
        """


@dataclass(frozen=True)
class RolloutGroup:
    """The scored samples of one prompt. Exactly one train step consumes it, or it is dropped and counted."""

    id: str
    index: int  # position in the run's order of prompts; -1: not one of ours
    trajectories: tuple[Trajectory, ...]
    pool: str = ""  # single samples of one pool share a baseline: the mean of their rewards in the train step
    advantages: tuple[float | None, ...] = ()  # one a trajectory, where the user has given them
    judges: bool = True  # its reward may be compared with other versions'; not where its task was chosen for its reward

    @property
    def rewards(self) -> list[float]:
        """Rewards of the samples that have one."""
        return [t.reward.value for t in self.trajectories if t.reward is not None and t.reward.value is not None]


Lag = Callable[[RolloutGroup], int]


class IndexedSource(ABC):
    """Groups that carry an index: of our own prompts (`Collector`), or of Atropos (`AtroposCollector`)."""

    def __init__(self, cursor: int, consumed: int, dropped: Iterable[int] = ()) -> None:
        self.cursor = cursor  # the next index that was never started
        self.consumed = consumed  # groups
        self.dropped = list(dropped)  # indices, since `take_dropped`
        self.waiting: list[RolloutGroup] = []  # finished, and not yet in a batch

    async def __aenter__(self) -> Self:
        return self

    @abstractmethod
    async def __aexit__(self, *_: object) -> None:
        """End; nothing that was not handed out counts as consumed."""

    @abstractmethod
    async def next_batch(self, steps_done: int, lag: Lag) -> list[RolloutGroup]:
        """Wait for a batch; may be cancelled without loss."""

    def learned(self, batch: Sequence[RolloutGroup]) -> None:
        """A train step has been made of a batch that was handed out; most sources need not know."""
        return

    def adopted(self) -> None:
        """Continue from another version: pending groups are too old, and that is no reason for an alert."""
        return

    @abstractmethod
    def pace_on(self, steps_done: int) -> None:
        """A train step is done: more groups may start."""

    def give_back(self, batch: Sequence[RolloutGroup]) -> None:
        """A batch that was handed out and not used comes first again."""
        self.consumed -= len(batch)
        self.waiting = [*batch, *self.waiting]

    def discard(self, batch: Sequence[RolloutGroup]) -> None:
        """A batch that was handed out taught nothing, because its policy is no more."""
        self.consumed -= len(batch)
        self.dropped += [group.index for group in batch]

    def pending(self) -> list[int]:
        """Indices that are started and neither consumed nor dropped."""
        return [group.index for group in self.waiting]

    def curriculum_books(self) -> CurriculumBooks | None:
        """State of the curriculum for a checkpoint; None when tasks follow one another."""
        return None

    def take_dropped(self) -> list[int]:
        """Indices dropped since the last call."""
        dropped, self.dropped = self.dropped, []
        return dropped


def mean_reward(groups: Iterable[RolloutGroup]) -> float:
    """Mean over all samples that have a reward; 0 without any."""
    rewards = [reward for group in groups for reward in group.rewards]
    return sum(rewards) / len(rewards) if rewards else 0.0


_FAILED = frozenset({"cancelled", "abort", "deadline", "error"})


def usable(trajectory: Trajectory) -> bool:
    """True if the trajectory has ended properly and has a finite reward."""
    return not problem(trajectory)


def problem(trajectory: Trajectory) -> str:
    """Why nothing can be learned from it; "" when it came to its end and has a finite reward."""
    reward = trajectory.reward
    if trajectory.error:
        return trajectory.error
    if trajectory.finish_reason in _FAILED or not trajectory.completion_ids:
        return f"it ended with {trajectory.finish_reason!r} after {len(trajectory.completion_ids)} tokens"
    if reward is None or reward.value is None:
        return reward.error if reward is not None and reward.error else "it has no reward"
    return "" if math.isfinite(reward.value) else f"its reward is {reward.value}"
