"""Rank 0's learner of a tuning run, where ranks divide the model, and what the others do."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from shared.trajectories import Trajectory
from trainer.datasets.learner import DataOptions, DataReport, Measured
from trainer.datasets.led import Led
from trainer.learn.batches import SampleGroup
from trainer.learn.compute import Others, Work
from trainer.learn.options import AdapterShape
from trainer.learners.asks import Parity
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


TunerDeed = Tune | Measure | Parity


class LedTuner(Led, TuneLearner):
    """The same as `TuneLearner` for whoever asks."""

    def __init__(
        self, others: Others, model: Any, tuning: Tuning, beta: float, options: DataOptions, whole: Whole | None
    ) -> None:
        build = partial(TuneLearner.__init__, self, model, tuning, shape_of(options), beta, options, whole=whole)
        self._lead(others, MakeTuner(tuning, beta, options), build)

    def train(self, items: Sequence[SampleGroup], step: int) -> Work[DataReport]:
        """See `DataLearner`."""
        return self._all.work(Tune(tuple(items), step), partial(super().train, items, step))

    def measure(self, items: Sequence[SampleGroup]) -> Work[Measured]:
        """See `DataLearner`."""
        return self._all.work(Measure(tuple(items)), partial(super().measure, items))

    def parity(self, trajectories: Sequence[Trajectory]) -> Work[float]:
        """See `DataLearner`."""
        return self._all.work(Parity(tuple(trajectories)), partial(super().parity, trajectories))


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


def shape_of(options: DataOptions) -> AdapterShape:
    """Tuning always has a LoRA."""
    assert options.shape is not None, "a head alone is another kind of run's"
    return options.shape
