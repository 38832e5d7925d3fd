"""What a run asks of its learner where that is one of the training service's: plain messages, msgpack.

They are the methods of `trainer/learn/learner.py:Learner`. Weights and moments travel as `trainer/learn/packing.py`
writes them.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from shared.adapters import GateCheck
from shared.trajectories import Trajectory
from trainer.gate import GateLimits
from trainer.learn.batches import SampleGroup
from trainer.learn.options import AdapterShape, OptimizeOptions
from trainer.learn.steps import StepReport


class Train(msgspec.Struct, frozen=True, tag="train"):
    """One train step and its checks."""

    groups: tuple[SampleGroup, ...]
    step: int
    policy_step: int
    probes: tuple[tuple[int, ...], ...]


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    """The train step was good."""


class Revert(msgspec.Struct, frozen=True, tag="revert"):
    """It was not."""


class Parity(msgspec.Struct, frozen=True, tag="parity"):
    """How far a worker's log-probabilities are."""

    trajectories: tuple[Trajectory, ...]


class Gaps(msgspec.Struct, frozen=True, tag="gaps"):
    """How far those of each sample are from these weights'; None is the base."""

    groups: tuple[SampleGroup, ...]
    weights: bytes | None


class Put(msgspec.Struct, frozen=True, tag="put"):
    """Weights: the present ones, those of the best version, or what the run began with."""

    what: Literal["present", "best", "origin"]
    weights: bytes | None


class Restore(msgspec.Struct, frozen=True, tag="restore"):
    """Go on where a checkpoint was taken."""

    snapshot: bytes


class Get(msgspec.Struct, frozen=True, tag="get"):
    """The present weights, or all of a checkpoint's."""

    what: Literal["weights", "snapshot", "config"]


Asked = Train | Accept | Revert | Parity | Gaps | Put | Restore | Get


class TrainDone(msgspec.Struct, frozen=True, tag="train"):
    """See `Trained`."""

    report: StepReport
    checks: tuple[GateCheck, ...]
    weights: bytes


class Numbers(msgspec.Struct, frozen=True, tag="numbers"):
    """Of `Parity` one, of `Gaps` one a sample."""

    values: tuple[float, ...]


class Packed(msgspec.Struct, frozen=True, tag="packed"):
    """Of `Get`; the other ones have nothing to say."""

    data: bytes = b""


Said = TrainDone | Numbers | Packed


@dataclass(frozen=True)
class LearnerOptions:
    """What a run's learner is made with."""

    shape: AdapterShape | None  # None: a head learns alone
    optimize: OptimizeOptions
    limits: GateLimits
    seed: int = 0
    checkpoint_layers: bool = False
    remembered: int = 2  # policy steps whose weights are at hand for the distances
