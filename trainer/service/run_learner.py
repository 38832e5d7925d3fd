"""The learner of a run of `mlx_parallm_train` in a service: the same `Learner` that the run would have of its own.

Its requests are the methods of `trainer/learn/learner.py:Learner`; what they make is, to the byte, what they would make
in the run's own process on this machine.
"""

from typing import Any

import msgspec

from shared.errors import ConflictError
from trainer.learn.compute import Work
from trainer.learn.learner import Learner, Trained
from trainer.learn.packing import pack
from trainer.learners.asks import Asked, Get, LearnerOptions, Numbers, Packed, Said, TrainDone
from trainer.learners.loop_learner import build_learner
from trainer.learners.obeying import obeyed

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
        if isinstance(asked, Get):
            return Packed(self._get(asked))
        match (yield from obeyed(self._learner, asked)):
            case Trained(report, weights, checks):
                return TrainDone(report, checks, pack({"weights": weights}))
            case float(gap):
                return Numbers((gap,))
            case list(gaps):
                return Numbers(tuple(gaps))
        return Packed()

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
