"""The learner of a run of `mlx_parallm_train` in a service: the same `Learner` that the run would have of its own.

Its requests are the methods of `trainer/learn/learner.py:Learner`; what they make is, to the byte, what they would make
in the run's own process on this machine.
"""

from typing import Any

import msgspec

from shared.errors import ConflictError
from trainer.learn.compute import Work
from trainer.learn.learner import Learner
from trainer.learn.packing import pack, unpack
from trainer.learners.asks import (
    Accept,
    Asked,
    Gaps,
    Get,
    LearnerOptions,
    Numbers,
    Packed,
    Parity,
    Put,
    Restore,
    Revert,
    Said,
    Train,
    TrainDone,
)
from trainer.learners.loop_learner import build_learner
from trainer.state import Arrays, Snapshot

_asked: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)


class RunLearner:
    """Belongs to the thread that built it; ValueError when the model has no layers for the adapter."""

    def __init__(self, model: Any, made_with: bytes) -> None:
        try:
            options = msgspec.msgpack.decode(made_with, type=LearnerOptions)
        except msgspec.DecodeError as error:
            raise ValueError(f"its options cannot be read: {error}") from error
        self._learner: Learner = build_learner(model, options)

    def answer(self, asked: Asked) -> Work[bytes]:
        """Do what is asked, and say what came of it; ConflictError when what is given is another adapter's."""
        try:
            said = yield from self._said(asked)
        except ValueError as error:
            raise ConflictError(str(error)) from error
        return msgspec.msgpack.encode(said)

    def _said(self, asked: Asked) -> Work[Said]:
        learner = self._learner
        match asked:
            case Train():
                trained = yield from learner.train(asked.groups, asked.step, asked.policy_step, asked.probes)
                return TrainDone(trained.report, trained.checks, pack({"weights": trained.weights}))
            case Parity():
                return Numbers(((yield from learner.parity(asked.trajectories)),))
            case Gaps():
                return Numbers(tuple((yield from learner.gaps(asked.groups, _weights(asked.weights)))))
            case Accept():
                learner.accept()
            case Revert():
                learner.revert()
            case Restore():
                learner.restore(snapshot_of(asked.snapshot, learner.config()))
            case Put():
                self._put(asked)
            case Get():
                return Packed(self._get(asked))
        return Packed()

    def _put(self, asked: Put) -> None:
        weights = _weights(asked.weights)
        if asked.what == "best":
            self._learner.anchor(weights)
        elif weights is None:
            raise ConflictError(f"no weights are given as the {asked.what} ones")
        elif asked.what == "origin":
            self._learner.begin_with(weights)
        else:
            self._learner.load(weights)

    def _get(self, asked: Get) -> bytes:
        if asked.what == "config":
            return self._learner.config()
        if asked.what == "weights":
            return pack({"weights": self._learner.weights()})
        snapshot = self._learner.snapshot()
        return pack({"adapter": snapshot.adapter, "optimizer": snapshot.optimizer})

    def state(self) -> bytes:
        """All that it goes on from."""
        return self._learner.state()

    def restore(self, state: bytes) -> None:
        """Go on exactly where `state` was taken."""
        self._learner.resume(state)


def decoded(body: bytes) -> Asked:
    """What is asked; ConflictError when it cannot be read."""
    try:
        return _asked.decode(body)
    except msgspec.DecodeError as error:
        raise ConflictError(f"this cannot be asked of a run's learner: {error}") from error


def snapshot_of(data: bytes, config: bytes) -> Snapshot:
    """A checkpoint's part out of what `Get` has given."""
    groups = unpack(data, "adapter", "optimizer")
    return Snapshot(groups["adapter"], config, groups["optimizer"])


def _weights(data: bytes | None) -> Arrays | None:
    return None if data is None else unpack(data, "weights")["weights"]
