"""Rank 0's learner of a distilling run, where ranks divide the model, and what the others do (see tuning/led.py).

The teacher's scores travel with the rows that are asked about: no rank but the first keeps those of the data set.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from trainer.datasets.learner import DataOptions, DataReport, Measured
from trainer.distilling.learner import DistillLearner
from trainer.distilling.teacher import ScoredRow
from trainer.learn.batches import SampleGroup
from trainer.learn.compute import Others, Work
from trainer.tuning.led import LedTuner, shape_of
from worker.engine.model.sites import Whole


class MakeDistiller(msgspec.Struct, frozen=True, tag="make-distiller"):
    """Have such a learner, in place of what was there."""

    options: DataOptions


class Distill(msgspec.Struct, frozen=True, tag="distill"):
    """One train step."""

    items: tuple[SampleGroup, ...]
    rows: dict[str, ScoredRow]
    step: int


class Compare(msgspec.Struct, frozen=True, tag="compare"):
    """How far the weights are from the teacher on these."""

    items: tuple[SampleGroup, ...]
    rows: dict[str, ScoredRow]


class LedDistiller(LedTuner, DistillLearner):
    """The same as `DistillLearner` for whoever asks."""

    def __init__(
        self, others: Others, model: Any, rows: Mapping[str, ScoredRow], options: DataOptions, whole: Whole | None
    ) -> None:
        build = partial(DistillLearner.__init__, self, model, rows, shape_of(options), options, whole)
        self._lead(others, MakeDistiller(options), build)

    def train(self, items: Sequence[SampleGroup], step: int) -> Work[DataReport]:
        """See `DataLearner`."""
        ask = Distill(tuple(items), self._rows_of(items), step)
        return self._all.work(ask, partial(DistillLearner.train, self, items, step))

    def measure(self, items: Sequence[SampleGroup]) -> Work[Measured]:
        """See `DataLearner`."""
        ask = Compare(tuple(items), self._rows_of(items))
        return self._all.work(ask, partial(DistillLearner.measure, self, items))

    def _rows_of(self, items: Sequence[SampleGroup]) -> dict[str, ScoredRow]:
        return {item.id: self._rows[item.id] for item in items}


def made_distiller(model: Any, asked: MakeDistiller, whole: Whole | None) -> DistillLearner:
    """On another rank."""
    return DistillLearner(model, {}, shape_of(asked.options), asked.options, whole)


def distilled(learner: DistillLearner, asked: Distill | Compare) -> Work[object]:
    """There, what rank 0 does."""
    learner.know(asked.rows)
    if isinstance(asked, Compare):
        return (yield from learner.measure(asked.items))
    return (yield from learner.train(asked.items, asked.step))
