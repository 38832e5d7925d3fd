"""What travels between the trainer and the process of a user's own code (own_code.py, own_process.py).

What an environment keeps to itself (`info`), options and references may be any object: they travel as the bytes that
the sender made of them. Only the user's process makes objects of them again, so no code of the user's, nor of whatever
wrote such bytes, runs in the trainer.
"""

from typing import Any, Literal

import msgspec

from shared.jobs import Message


class Load(msgspec.Struct, frozen=True):
    """The first message: what the process is for."""

    kind: Literal["environment", "reward"]
    path: str  # module:name
    options: bytes
    timeout_s: float  # for one call


class Seen(msgspec.Struct, frozen=True):
    """An observation."""

    prompt: str | tuple[Message, ...]
    info: bytes | None = None


class Reset(msgspec.Struct, frozen=True, tag=True):
    """Answered with `Seen`."""

    index: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """Answered with `Judged`."""

    seen: Seen
    action: str


class Score(msgspec.Struct, frozen=True, tag=True):
    """Answered with `Judged`."""

    completion: str
    reference: bytes


class Call(msgspec.Struct, frozen=True):
    """One call; its number comes back with the answer."""

    number: int
    what: Reset | Step | Score


class Judged(msgspec.Struct, frozen=True, tag=True):
    """An outcome, or a score."""

    reward: float | None
    components: dict[str, float] = {}
    done: bool = True
    messages: tuple[Message, ...] = ()
    info: bytes | None = None


class Observed(msgspec.Struct, frozen=True, tag=True):
    """What a reset gave."""

    seen: Seen


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Load`."""

    name: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The call raised, or ran out of time; or the code is not what it must be, which ends the run."""

    error: str
    kind: Literal["raised", "late", "setup"]


class Answer(msgspec.Struct, frozen=True):
    """To a call by its number; 0: to `Load`. Without a result it says that the process is alive."""

    number: int = 0
    result: Judged | Observed | Loaded | Failed | None = None


encode = msgspec.msgpack.Encoder().encode
decode_load = msgspec.msgpack.Decoder(Load).decode
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def packed(value: Any) -> bytes:
    """Any object, for the user's process."""
    from multiprocessing.reduction import ForkingPickler

    return bytes(ForkingPickler.dumps(value))
