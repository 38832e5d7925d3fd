"""Rank 0's learner of a run on a data set, where ranks divide the model (trainer/ranks): what all kinds are asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from trainer.datasets.learner import DataLearner
from trainer.learn.compute import Others, Work
from trainer.learn.packing import pack, unpack
from trainer.learners.asks import Accept, Revert
from trainer.learners.obeying import snapshot_of, weights_of
from trainer.ranks.learner import packed_snapshot
from trainer.ranks.work import Together
from trainer.state import Arrays, Snapshot


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Learn on from these weights."""

    weights: bytes


class GoOn(msgspec.Struct, frozen=True, tag="go-on"):
    """Go on where a checkpoint was taken, and fall back to `good`."""

    snapshot: bytes
    good: bytes | None


DataDeed = Begin | GoOn | Accept | Revert


class Led(DataLearner[Any]):
    """Stands before a kind of learner, which it has the other ranks do likewise."""

    def _lead(self, others: Others, ask: msgspec.Struct, build: Callable[[], None]) -> None:
        """Build it, as all ranks do at this word."""
        self._all = Together(others, self)
        self._all.now(ask, build)

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


def done_at_once(learner: DataLearner[Any], asked: DataDeed) -> Work[object]:
    """On another rank, what rank 0 does."""
    match asked:
        case Begin():
            learner.begin_with(unpack(asked.weights, "weights")["weights"])
        case GoOn():
            learner.restore(snapshot_of(asked.snapshot, learner.config()), weights_of(asked.good))
        case Accept():
            learner.accept()
        case Revert():
            learner.revert()
    return None
    yield  # so that it is work
