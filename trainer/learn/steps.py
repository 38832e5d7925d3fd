"""A train step as plain data: what it will do, the sums while it is done, and what it has done."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.learn.batches import SampleGroup
from trainer.learn.losses import StepTotals
from trainer.learn.measures import Distances


@dataclass(frozen=True)
class StepReport:
    """Figures of a train step."""

    updated: bool
    loss: float = 0.0
    learning_rate: float = 0.0
    grad_norm: float = 0.0
    update_rms: float = 0.0  # root mean square of the change of the adapter's parameters
    entropy: float = 0.0
    clip_fraction: float = 0.0
    kl: float = 0.0  # k3 against the reference; 0 when beta is 0
    tokens: int = 0
    sequences: int = 0
    seconds: float = 0.0
    distances: Distances | None = None
    nonfinite_gradients: int = 0  # minibatches whose update was left out
    value_loss: float | None = None  # of the value head; None: there is none
    explained: float | None = None  # share of the variance of the returns that the values had predicted


@dataclass
class Sums:
    """Running sums over a train step's microbatches; those of its parts add up."""

    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    value: float = 0.0
    grad_norm: float = 0.0
    nonfinite: int = 0

    def add(self, more: "Sums") -> None:
        """Add the sums of another part of the same update."""
        self.put([own + other for own, other in zip(self.added(), more.added(), strict=True)])

    def added(self) -> list[float]:
        """Values whose sum over parts is that of the whole update."""
        return [self.loss, self.entropy, self.clipped, self.kl, self.value]

    def put(self, added: Sequence[float]) -> None:
        """Set the values that `added` returns."""
        self.loss, self.entropy, self.clipped, self.kl, self.value = added


@dataclass(frozen=True)
class StepPlan:
    """Updates of a train step, independent of where they are computed."""

    minis: list[list[SampleGroup]]
    order: list[int]  # places of the minibatches that are learned from, one after the other, in all epochs
    totals: StepTotals
    parts: list[StepTotals]  # of each minibatch
    rate: float

    @property
    def several(self) -> bool:
        """True if the step makes more than one update."""
        return len(self.order) > 1
