"""A train step over items of a data set, and the weights to fall back to. Belongs to the MLX thread.

Plain data goes in and out. What an item's loss is, and what is measured of it, a kind of run says itself.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from mlx_model.sites import Whole
from shared.errors import SetupError
from trainer.learn.adam import AdamSteps, StepSizes, update_together
from trainer.learn.compute import Work
from trainer.learn.options import AdapterShape, Schedule
from trainer.learn.peers import Peers
from trainer.learn.policy import Policy
from trainer.learners.calls import exposed, exposed_read
from trainer.rollouts.sight import Sight
from trainer.state import Arrays, LearnerSnapshot, Moments

T = TypeVar("T")


@dataclass(frozen=True)
class DataOptions:
    """Constants of every train step."""

    schedule: Schedule
    shape: AdapterShape | None  # of the LoRA; None: a head learns alone
    microbatch_tokens: int
    max_grad_norm: float
    weight_decay: float
    adam_betas: tuple[float, float]
    seed: int
    checkpoint_layers: bool = False


class DataReport(NamedTuple):
    """Figures of one train step."""

    loss: float
    grad_norm: float
    is_finite: bool  # else nothing was changed
    tokens: int = 0  # in the loss


class Measured(NamedTuple):
    """Figures of the weights on held-out items."""

    right: float  # a share, from 0 to 1; versions are compared by it
    loss: float | None = None
    margin: float | None = None


class ItemSize(NamedTuple):
    """Size of an item in a batch: its rows, and positions of the longest one."""

    rows: int
    positions: int


def policy_of(
    model: Any, shape: AdapterShape, options: DataOptions, sight: Sight | None = None, whole: Whole | None = None
) -> Policy:
    """A LoRA on the model, which sees with `sight`; `whole`: what a model was that ranks divide.

    SetupError when it does not fit: a target that the model has not, DoRA on experts.
    """
    try:
        return Policy(
            model, shape, seed=options.seed, checkpoint_layers=options.checkpoint_layers, sight=sight, whole=whole
        )
    except ValueError as error:
        raise SetupError(f"bad settings: {error}") from error


class DataLearner(ABC, Generic[T]):
    """One AdamW for each part that learns, clipped by the norm of all of them."""

    def __init__(
        self, options: DataOptions, learns: Mapping[str, nn.Module], rates: Mapping[str, float] | None = None
    ) -> None:
        """`rates`: of a part, in multiples of the learning rate."""
        self._options, self._learns, self._rates = options, dict(learns), dict(rates or {})
        self._adams = {name: AdamSteps(module, are_constant=True) for name, module in learns.items()}
        self._good: Arrays = {}
        self._good_moments: dict[str, Any] = {}
        self.accept()
        self.shapes = {name: tuple(value.shape) for name, value in self._good.items()}

    # -- for each kind of learner

    @exposed
    @abstractmethod
    def measure(self, items: Sequence[T]) -> Work[Measured]:
        """Measure how well the weights predict these items."""

    @exposed_read
    @abstractmethod
    def weights(self) -> Arrays:
        """A copy as plain data."""

    @exposed_read
    @abstractmethod
    def config(self) -> bytes:
        """`adapter_config.json` of the present weights."""

    @abstractmethod
    def digest(self) -> int:
        """A sum over the bits of what learns, by which ranks see that they have the same."""

    @abstractmethod
    def _size(self, item: T) -> ItemSize: ...

    @abstractmethod
    def _tokens(self, items: Sequence[T]) -> int:
        """Number of tokens in the loss; 0 for a loss without tokens."""

    @abstractmethod
    def gradient(self, part: Sequence[T], items: Sequence[T]) -> tuple[Any, dict[str, Any]]:
        """The part's share of the loss of all items, and the gradients of what learns."""

    @abstractmethod
    def load(self, weights: Arrays) -> None: ...

    @property
    def _peers(self) -> Peers:
        """Ranks that learn of other samples."""
        return Peers()

    def whole(self, gradients: dict[str, Any]) -> dict[str, Any]:
        """Sum gradients over all ranks where the model is divided; here there is one rank."""
        return gradients

    def _agree(self) -> None:
        """Make the weights equal on all ranks after an update."""

    # -- learning

    @exposed
    def train(self, items: Sequence[T], step: int) -> Work[DataReport]:
        """One update; `step` sets the learning rates."""
        loss, gradients = 0.0, None
        for part in self._own_parts(items):
            if part is None:
                yield
                continue
            value, more = self.gradient(part, items)
            gradients = more if gradients is None else tree_map(mx.add, gradients, more)
            mx.eval(value, gradients)
            loss += float(value.item())
            yield
        if gradients is None:
            gradients = {
                name: tree_map(mx.zeros_like, each.trainable_parameters()) for name, each in self._learns.items()
            }
        (loss,) = self._peers.numbers([loss])
        if not np.isfinite(loss):
            return DataReport(loss, math.nan, is_finite=False, tokens=self._tokens(items))
        norm, updated = update_together(
            self._adams, self.whole(gradients), self._sizes(step), self._options.max_grad_norm
        )
        if updated:
            self._agree()
        return DataReport(loss, norm, is_finite=updated, tokens=self._tokens(items))

    def _sizes(self, step: int) -> dict[str, StepSizes]:
        options, rate = self._options, self._options.schedule.rate(step)
        return {
            name: StepSizes(rate * self._rates.get(name, 1.0), options.adam_betas, options.weight_decay)
            for name in self._adams
        }

    def _own_parts(self, items: Sequence[T]) -> Iterator[list[T] | None]:
        """This rank's of them; None: others have more."""
        sizes = [size.rows * size.positions for size in map(self._size, items)]
        return self._peers.each(self._parts(self._peers.share(items, sizes)))

    def _parts(self, items: Sequence[T]) -> Iterator[list[T]]:
        """Cut items into parts in order, as many at once as the padded positions allow; at least one."""
        part: list[T] = []
        longest = 0
        for item in items:
            size = self._size(item)
            longest = max(longest, size.positions)
            if part and longest * (len(part) + 1) * size.rows > self._options.microbatch_tokens:
                yield part
                part, longest = [], size.positions
            part.append(item)
        if part:
            yield part

    # -- weights

    @exposed
    def begin_with(self, weights: Arrays) -> None:
        """Continue from these weights, which also become the last good ones."""
        self.load(weights)
        self.accept()

    @exposed_read
    def snapshot(self) -> LearnerSnapshot:
        """All of the state, for a checkpoint."""
        return LearnerSnapshot(self.weights(), self.config(), self._moments())

    @exposed
    def restore(self, snapshot: LearnerSnapshot, good: Arrays | None = None) -> None:
        """Restore a checkpoint's state exactly; `good`: the last good weights, if they are others.

        Their moments are not known any more, unless nothing had been learned yet: they begin anew.
        """
        fresh = self._good_moments
        self.load(snapshot.adapter)
        for name, adam in self._adams.items():
            adam.load_moments(_of_part(snapshot.optimizer, name))
        self.accept()
        if good is not None:
            self._good, self._good_moments = good, fresh

    @exposed
    def accept(self) -> None:
        """The present weights are the last good ones."""
        self._good = self.weights()
        self._good_moments = {name: adam.state() for name, adam in self._adams.items()}

    @exposed
    def revert(self) -> None:
        """Back to the last good weights and their moments."""
        self.load(self._good)
        for name, adam in self._adams.items():
            adam.put_back(self._good_moments[name])

    def _moments(self) -> Moments:
        return {f"{part}.{name}": value for part, adam in self._adams.items() for name, value in adam.moments().items()}


def _of_part(moments: Moments, part: str) -> Moments:
    return {name.removeprefix(f"{part}."): value for name, value in moments.items() if name.startswith(f"{part}.")}
