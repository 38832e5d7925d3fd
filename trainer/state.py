"""The progress of a run, and the types of its weights: plain data, saved with every checkpoint."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[np.float32]]  # an adapter's parameters under mlx-lm's names
Moments = dict[str, np.ndarray[Any, Any]]  # an optimizer's state


@dataclass(frozen=True)
class GradientMeans:
    """AdamW's moments without their bias towards 0, by parameter."""

    first: Arrays = field(
        default_factory=dict
    )  # mean of the gradient; empty: not published, or there was no update yet
    second: Arrays = field(default_factory=dict)  # mean of its square


@dataclass(frozen=True)
class LearnerSnapshot:
    """All of a learner's state. No random state: every draw follows from the run's seed and a counter."""

    adapter: Arrays
    adapter_config: bytes  # adapter_config.json
    optimizer: Moments


class DrawnTask(msgspec.Struct, frozen=True, array_like=True):
    """The task that a curriculum has chosen for a group."""

    task: int
    evenly: bool  # drawn from all tasks alike: such groups alone compare one version with another


class CurriculumBooks(msgspec.Struct, frozen=True):
    """State of a curriculum in a checkpoint."""

    identity: str  # of the tasks and the curriculum
    drawn: dict[int, DrawnTask]  # by the index of each pending group
    seen: bytes  # what tried tasks have earned (`trainer/rollouts/task_pool.py`)
    kinds: list[tuple[float, float]] = []  # of each kind of tasks: what it has earned, of how many samples
    wanted: float | None = None  # difficulty, as a place in the task set


class LiveBooks(msgspec.Struct, frozen=True):
    """Entries of the live queue that a run has taken: all up to `newest`, except those that wait."""

    newest: str = ""
    waiting: list[str] = []


class OfferedStep(msgspec.Struct, frozen=True):
    """The train step whose weights a run on a data set offers; None is what is no number."""

    loss: float | None
    grad_norm: float | None
    is_finite: bool
    tokens: int


class RunState(msgspec.Struct):
    """Where the run is.

    **train step** batches consumed, also those that taught nothing · **policy step** train steps whose result is part
    of the present policy. Consumed are all indices below `cursor` that are neither pending nor dropped.
    """

    run: str
    train_step: int = 0
    policy_step: int = 0
    version: int = 0  # the adapter version that holds the present policy; 0: none yet
    best_version: int = 0
    best_reward: float | None = None
    held_out: float | None = None  # the last good version's reward on held-out tasks
    held_out_true: float | None = None  # its `--held-out-reward` on them
    best_held_out: float | None = None  # the best that a served version earned on them
    cursor: int = 0  # next index that was never started
    pending: list[int] = []  # started, neither consumed nor dropped: played again after a resume
    consumed: int = 0  # groups
    dropped: list[int] = []
    posted_steps: int = 0  # train steps on what users posted; they do not count towards the run's length
    live_steps: int = 0  # train steps on live traffic
    unpublished: int = 0  # policy steps since the served version
    taken: list[str] = []  # entries of the live queue that the weights know and that are not acknowledged yet
    orders: list[str] = []  # ids of the last orders that the weights know
    policy_steps: dict[int, int] = {}  # adapter version -> policy step that made it
    good_on: dict[str, dict[int, tuple[float, float]]] = {}  # tasks -> version -> mean reward and its standard error
    best_on: str = ""  # the tasks whose rewards decide which version is the best
    rejected: int = 0
    rollbacks: int = 0
    updates: int = 0  # policy steps ever made; a rollback takes none away
    swaps: int = 0  # versions served
    saves: int = 0  # checkpoints
    last_update_ms: int = 0  # Unix time of the last policy step; 0: none yet
    trajectories: int = 0
    failed: int = 0  # of them: samples without a completion or a reward
    tokens: int = 0
    seconds: float = 0.0  # of training so far, over all resumes
    curriculum: CurriculumBooks | None = None
    ring: str = ""  # where it has been trained; "": not known
    base_sha256: str = ""  # of the model that it has been trained on; "": not known
    mode: str = ""  # of learning; "": not written down by the version that saved it
    learns_from: dict[str, str] = {}  # tasks and reward: setting -> digest; empty: not written down
    started_from: str = ""  # the adapter that it began with, as `--start-from` named it; "": the base
    live: LiveBooks = LiveBooks()
    offered: OfferedStep | None = None  # until it is judged, and its line is written
    schema: int = 1

    @property
    def own_steps(self) -> int:
        """Train steps on our own prompts; generation is paced by them."""
        return self.train_step - self.posted_steps - self.live_steps
