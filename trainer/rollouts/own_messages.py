"""What travels between the trainer and the process of a user's own code (own_code.py, own_process.py).

What an environment keeps to itself (`info`), options and references may be any object: they travel as the bytes that
the sender made of them. Only the user's process makes objects of them again, so no code of the user's, nor of whatever
wrote such bytes, runs in the trainer.
"""

from typing import Any, Literal

import msgspec

from trainer.rollouts.environments import Observation, Outcome

Kind = Literal["environment", "reward"]


class Start(msgspec.Struct, frozen=True):
    """The first message: what the process is for. Answered with a name."""

    kind: Kind
    path: str  # module:name
    options: bytes
    timeout_s: float  # for one call


class Reset(msgspec.Struct, frozen=True, tag=True):
    """Answered with an observation."""

    index: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """Answered with an outcome."""

    observation: Observation
    action: str


class Score(msgspec.Struct, frozen=True, tag=True):
    """Answered with an outcome."""

    completion: str
    reference: bytes


class Call(msgspec.Struct, frozen=True):
    """One call; its number comes back with the answer."""

    number: int
    what: Reset | Step | Score


class Failed(msgspec.Struct, frozen=True):
    """The call raised, or ran out of time; or the code is not what it must be, which ends the run."""

    error: str
    kind: Literal["raised", "late", "setup"]


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """To a call by its number; 0: to `Start`, or, without anything else, that the process is alive."""

    number: int = 0
    name: str | None = None  # of the environment or the reward
    observation: Observation | None = None  # `info` is bytes here
    outcome: Outcome | None = None  # likewise
    failed: Failed | None = None


encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(Start).decode
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def packed(value: Any) -> bytes:
    """Any object, for the user's process."""
    from multiprocessing.reduction import ForkingPickler

    return bytes(ForkingPickler.dumps(value))
