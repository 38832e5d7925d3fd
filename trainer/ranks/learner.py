"""Rank 0's learner of a run: what it is asked, all ranks do."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from shared.trajectories import Trajectory
from trainer.learn.batches import SampleGroup
from trainer.learn.compute import Others, Work
from trainer.learn.learner import Learner, Trained
from trainer.learn.packing import pack
from trainer.learners.asks import Accept, Gaps, LearnerOptions, Parity, Put, Restore, Revert, Train
from trainer.ranks.work import Together
from trainer.state import Arrays, Snapshot
from worker.engine.model.sites import Whole


class Make(msgspec.Struct, frozen=True, tag="make"):
    """Have such a learner, in place of what was there."""

    options: LearnerOptions


class LedLearner(Learner):
    """The same as `Learner` for whoever asks; ValueError when the model has no layers for the adapter."""

    def __init__(self, others: Others, model: Any, options: LearnerOptions, whole: Whole | None) -> None:
        self._all = Together(others, self)
        build = partial(
            super().__init__,
            model,
            options.shape,
            options.optimize,
            options.limits,
            seed=options.seed,
            checkpoint_layers=options.checkpoint_layers,
            remembered=options.remembered,
            whole=whole,
        )
        self._all.now(Make(options), build)

    def train(
        self, groups: Sequence[SampleGroup], step: int, policy_step: int, probes: Sequence[tuple[int, ...]]
    ) -> Work[Trained]:
        """See `Learner`."""
        ask = Train(tuple(groups), step, policy_step, tuple(probes))
        return self._all.work(ask, partial(super().train, groups, step, policy_step, probes))

    def parity(self, trajectories: Sequence[Trajectory]) -> Work[float]:
        """See `Learner`."""
        return self._all.work(Parity(tuple(trajectories)), partial(super().parity, trajectories))

    def gaps(self, samples: Sequence[SampleGroup], weights: Arrays | None) -> Work[list[float]]:
        """See `Learner`."""
        ask = Gaps(tuple(samples), _packed(weights))
        return self._all.work(ask, partial(super().gaps, samples, weights))

    def anchor(self, best: Arrays | None) -> None:
        """See `Learner`."""
        self._put("best", best, partial(super().anchor, best))

    def begin_with(self, weights: Arrays) -> None:
        """See `Learner`."""
        self._put("origin", weights, partial(super().begin_with, weights))

    def load(self, weights: Arrays) -> None:
        """See `Learner`."""
        self._put("present", weights, partial(super().load, weights))

    def accept(self) -> None:
        """See `Learner`."""
        self._all.now(Accept(), super().accept)

    def revert(self) -> None:
        """See `Learner`."""
        self._all.now(Revert(), super().revert)

    def restore(self, snapshot: Snapshot) -> None:
        """See `Learner`."""
        self._all.now(Restore(packed_snapshot(snapshot)), partial(super().restore, snapshot))

    def _put(self, what: Literal["present", "best", "origin"], weights: Arrays | None, here: Any) -> None:
        self._all.now(Put(what, _packed(weights)), here)


def packed_snapshot(snapshot: Snapshot) -> bytes:
    """As `snapshot_of` reads it."""
    return pack({"adapter": snapshot.adapter, "optimizer": snapshot.optimizer})


def _packed(weights: Arrays | None) -> bytes | None:
    return None if weights is None else pack({"weights": weights})
