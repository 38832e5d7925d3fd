"""Rank 0's learner of a run on a data set, where ranks divide the model (trainer/ranks), and what the others do."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from shared.trajectories import Trajectory
from trainer.datasets.learner import DataOptions, DataReport, Measured
from trainer.learn.batches import SampleGroup
from trainer.learn.compute import Others, Work
from trainer.learn.options import AdapterShape
from trainer.learn.packing import pack, unpack
from trainer.learners.asks import Accept, Parity, Revert
from trainer.learners.obeying import snapshot_of, weights_of
from trainer.ranks.learner import packed_snapshot
from trainer.ranks.work import Together
from trainer.state import Arrays, Snapshot
from trainer.tuning.examples import Tuning
from trainer.tuning.learner import TuneLearner
from worker.engine.model.sites import Whole


class MakeTuner(msgspec.Struct, frozen=True, tag="make-tuner"):
    """Have such a learner, in place of what was there."""

    tuning: Tuning
    beta: float
    options: DataOptions


class Tune(msgspec.Struct, frozen=True, tag="tune"):
    """One train step."""

    items: tuple[SampleGroup, ...]
    step: int


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """What the weights get right of these."""

    items: tuple[SampleGroup, ...]


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Learn on from these weights."""

    weights: bytes


class GoOn(msgspec.Struct, frozen=True, tag="go-on"):
    """Go on where a checkpoint was taken, and fall back to `good`."""

    snapshot: bytes
    good: bytes | None


TunerDeed = Tune | Measure | Begin | GoOn | Accept | Revert | Parity


class LedTuner(TuneLearner):
    """The same as `TuneLearner` for whoever asks."""

    def __init__(
        self, others: Others, model: Any, tuning: Tuning, beta: float, options: DataOptions, whole: Whole | None
    ) -> None:
        build = partial(super().__init__, model, tuning, shape_of(options), beta, options, whole=whole)
        self._lead(others, MakeTuner(tuning, beta, options), build)

    def _lead(self, others: Others, ask: msgspec.Struct, build: Callable[[], None]) -> None:
        """Build it, as all ranks do at this word."""
        self._all = Together(others, self)
        self._all.now(ask, build)

    def train(self, items: Sequence[SampleGroup], step: int) -> Work[DataReport]:
        """See `DataLearner`."""
        return self._all.work(Tune(tuple(items), step), partial(super().train, items, step))

    def measure(self, items: Sequence[SampleGroup]) -> Work[Measured]:
        """See `DataLearner`."""
        return self._all.work(Measure(tuple(items)), partial(super().measure, items))

    def parity(self, trajectories: Sequence[Trajectory]) -> Work[float]:
        """See `DataLearner`."""
        return self._all.work(Parity(tuple(trajectories)), partial(super().parity, trajectories))

    def begin_with(self, weights: Arrays) -> None:
        """See `DataLearner`."""
        self._all.now(Begin(pack({"weights": weights})), partial(super().begin_with, weights))

    def restore(self, snapshot: Snapshot, good: Arrays | None = None) -> None:
        """See `DataLearner`."""
        ask = GoOn(packed_snapshot(snapshot), None if good is None else pack({"weights": good}))
        self._all.now(ask, partial(super().restore, snapshot, good))

    def accept(self) -> None:
        """See `DataLearner`."""
        self._all.now(Accept(), super().accept)

    def revert(self) -> None:
        """See `DataLearner`."""
        self._all.now(Revert(), super().revert)


def made(model: Any, asked: MakeTuner, whole: Whole | None) -> TuneLearner:
    """On another rank."""
    return TuneLearner(model, asked.tuning, shape_of(asked.options), asked.beta, asked.options, whole=whole)


def done(learner: TuneLearner, asked: TunerDeed) -> Work[object]:
    """There, what rank 0 does."""
    match asked:
        case Tune():
            return (yield from learner.train(asked.items, asked.step))
        case Measure():
            return (yield from learner.measure(asked.items))
        case Parity():
            return (yield from learner.parity(asked.trajectories))
        case Begin():
            learner.begin_with(unpack(asked.weights, "weights")["weights"])
        case GoOn():
            learner.restore(snapshot_of(asked.snapshot, learner.config()), weights_of(asked.good))
        case Accept():
            learner.accept()
        case Revert():
            learner.revert()
    return None


def shape_of(options: DataOptions) -> AdapterShape:
    """Tuning always has a LoRA."""
    assert options.shape is not None, "a head alone is another kind of run's"
    return options.shape
