"""Rank 0's learner of a head, where ranks divide the model, and what the others do.

All ranks have the same hidden states, and so the head's whole gradient each; a LoRA's is summed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import msgspec

from trainer.datasets.learner import DataOptions, DataReport, Measured
from trainer.datasets.led import Led
from trainer.heads.examples import Example, Form, Spread, Text
from trainer.heads.learner import HeadLearner
from trainer.learn.compute import Others, Work
from trainer.learn.options import HeadSettings
from worker.engine.model.sites import Whole


class Row(msgspec.Struct, frozen=True, array_like=True):
    """What ranks need to know of an example."""

    texts: tuple[tuple[int, ...], ...]
    target: float
    action: tuple[float, ...]
    weight: float

    @classmethod
    def of(cls, example: Example) -> Self:
        """Its ids alone."""
        return cls(tuple(text.ids for text in example.texts), example.target, example.action, example.weight)

    def example(self) -> Example:
        """As a learner has it."""
        return Example(tuple(map(_text, self.texts)), self.target, self.action, self.weight)


class MakeHead(msgspec.Struct, frozen=True, tag="make-head"):
    """Have such a learner, in place of what was there."""

    form: Form
    labels: tuple[str, ...]
    start: float | Spread
    head: dict[str, Any]
    options: DataOptions


class Learn(msgspec.Struct, frozen=True, tag="learn-head"):
    """One train step."""

    items: tuple[Row, ...]
    step: int


class Judge(msgspec.Struct, frozen=True, tag="judge"):
    """What the weights get right of these."""

    items: tuple[Row, ...]


class Read(msgspec.Struct, frozen=True, tag="read"):
    """What the head says of these."""

    texts: tuple[tuple[int, ...], ...]


HeadDeed = Learn | Judge | Read


class LedHead(Led, HeadLearner):
    """The same as `HeadLearner` for whoever asks."""

    def __init__(
        self,
        others: Others,
        model: Any,
        form: Form,
        labels: Sequence[str],
        start: float | Spread,
        head: HeadSettings,
        options: DataOptions,
        whole: Whole | None,
    ) -> None:
        build = partial(HeadLearner.__init__, self, model, form, labels, start, head, options, whole)
        self._lead(others, MakeHead(form, tuple(labels), start, head.model_dump(), options), build)

    def train(self, items: Sequence[Example], step: int) -> Work[DataReport]:
        """See `DataLearner`."""
        return self._all.work(Learn(tuple(map(Row.of, items)), step), partial(super().train, items, step))

    def measure(self, items: Sequence[Example]) -> Work[Measured]:
        """See `DataLearner`."""
        return self._all.work(Judge(tuple(map(Row.of, items))), partial(super().measure, items))

    def read(self, texts: Sequence[Text]) -> Work[list[list[float]]]:
        """See `HeadLearner`."""
        return self._all.work(Read(tuple(text.ids for text in texts)), partial(super().read, texts))


def made_head(model: Any, asked: MakeHead, whole: Whole | None) -> HeadLearner:
    """On another rank."""
    head = HeadSettings(**asked.head)
    return HeadLearner(model, asked.form, asked.labels, asked.start, head, asked.options, whole)


def head_done(learner: HeadLearner, asked: HeadDeed) -> Work[object]:
    """There, what rank 0 does."""
    match asked:
        case Learn():
            return (yield from learner.train([row.example() for row in asked.items], asked.step))
        case Judge():
            return (yield from learner.measure([row.example() for row in asked.items]))
        case Read():
            return (yield from learner.read(list(map(_text, asked.texts))))


def _text(ids: tuple[int, ...]) -> Text:
    return Text(None, "", ids)
