"""Messages between the trainer and the process of a user's own code (own_code.py, own_process.py).

What an environment keeps to itself (`info`), options and references may be any object: they travel as the bytes that
the sender made of them. Only the user's process makes objects of them again, so no code of the user's, nor of whatever
wrote such bytes, runs in the trainer.
"""

from typing import Any, Literal

import msgspec

from trainer.rollouts.environments import Observation, Outcome

Kind = Literal["environment", "reward", "copies"]


class Start(msgspec.Struct, frozen=True):
    """The first message: what the process is for. Answered with a name."""

    kind: Kind
    path: str  # module:name
    options: bytes
    timeout_s: float  # for one call


class ResetCall(msgspec.Struct, frozen=True, tag="Reset"):
    """Ask for a task; answered with an observation."""

    index: int


class StepCall(msgspec.Struct, frozen=True, tag="Step"):
    """Judge an action; answered with an outcome."""

    observation: Observation
    action: str


class ScoreCall(msgspec.Struct, frozen=True, tag="Score"):
    """Score a completion; answered with an outcome."""

    completion: str
    reference: bytes


class CopiesCall(msgspec.Struct, frozen=True, tag="Begin"):
    """Make copies of an environment that a network acts in. Answered with what they observe."""

    name: str  # of the set; an earlier one of this name ends
    copies: int
    seed: tuple[int, ...]
    longest: int  # steps after which an episode is cut off


class ActCall(msgspec.Struct, frozen=True, tag="Act"):
    """A step of all copies of a set. Answered with what came of it, or "lost" where the process has no such set."""

    name: str
    actions: list[Any]


What = ResetCall | StepCall | ScoreCall | CopiesCall | ActCall


class CodeCall(msgspec.Struct, frozen=True):
    """One call; its number comes back with the answer."""

    number: int
    what: What


class CodeFailure(msgspec.Struct, frozen=True):
    """The call raised, or ran out of time; or the code is not what it must be, which ends the run."""

    error: str
    kind: Literal["raised", "late", "setup", "lost"]


class Space(msgspec.Struct, frozen=True):
    """Observations and actions of an environment that a network acts in: one of some actions, or numbers."""

    observes: int
    actions: int = 0
    numbers: int = 0


class Played(msgspec.Struct, frozen=True):
    """State of all copies: arrays as bytes of float32, a row for each copy."""

    space: Space
    now: bytes  # observed now, of a new episode where one has ended
    last: bytes = b""  # observed after the step, before that
    rewards: list[float] = []
    failed: list[bool] = []
    timed_out: list[bool] = []


class CodeAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to a call by its number; 0: to `Start`, or, without anything else, a sign that the process is alive."""

    number: int = 0
    name: str | None = None  # of the environment or the reward
    observation: Observation | None = None  # `info` is bytes here
    outcome: Outcome | None = None  # likewise
    failed: CodeFailure | None = None
    played: Played | None = None


encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(Start).decode
decode_call = msgspec.msgpack.Decoder(CodeCall).decode
decode_answer = msgspec.msgpack.Decoder(CodeAnswer).decode


def packed(value: Any) -> bytes:
    """Any object, for the user's process."""
    from multiprocessing.reduction import ForkingPickler

    return bytes(ForkingPickler.dumps(value))
