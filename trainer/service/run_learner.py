"""A run's learner in the MLX thread of a service: `mlx_parallm_train --learner service` has no model of its own.

Its requests are calls of its exposed methods (trainer/learners/calls.py); what they make is, to the byte, what they
would make in the run's own process on this machine.
"""

from typing import Any

import msgspec

from shared.errors import ConflictError
from trainer.learn.compute import Work
from trainer.learners.calls import Call, arguments_of, called, encoded
from trainer.learners.kinds import PolicyOptions, policy_learner
from trainer.learners.policy import PolicyLearner

_call: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)


class RunLearner:
    """Belongs to the thread that built it; ValueError when the model has no layers for the adapter."""

    def __init__(self, model: Any, made_with: bytes) -> None:
        try:
            options = msgspec.msgpack.decode(made_with, type=PolicyOptions)
        except msgspec.DecodeError as error:
            raise ValueError(f"its options cannot be read: {error}") from error
        self._learner = policy_learner(model, options)

    def answer(self, method: str, arguments: tuple[Any, ...]) -> Work[bytes]:
        """The result of a call; ConflictError when what is given is another adapter's."""
        try:
            return encoded((yield from called(self._learner, method, arguments)))
        except ValueError as error:
            raise ConflictError(str(error)) from error

    def state(self) -> bytes:
        """All that it goes on from."""
        return self._learner.state()

    def restore(self, state: bytes) -> None:
        """Go on exactly where `state` was taken."""
        self._learner.resume(state)


def read_call(body: bytes) -> tuple[str, tuple[Any, ...]]:
    """The method and the arguments of a request; ConflictError when it cannot be read. In any thread."""
    try:
        call = _call.decode(body)
    except msgspec.DecodeError as error:
        raise ConflictError(f"this cannot be asked of a run's learner: {error}") from error
    return call.method, arguments_of(PolicyLearner, call)
