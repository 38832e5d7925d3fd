"""Messages between ranks: msgpack, on authentic connections (shared/wire.py)."""

import msgspec

from mlx_model.config import EngineConfig, SlotConfig
from shared.adapters import AdapterManifest
from shared.images.refs import VisionSpec
from shared.machine.status import MachineStatus


class Hello(msgspec.Struct, frozen=True):
    """A follower's first word on each of its two connections."""

    rank: int
    nonce: str  # of its process, as it stands in Redis
    line: str  # "turns" or "talk"


class EngineTurn(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Take a turn of the engine: rank 0 takes it, too. Only a worker reads what it holds (worker/engine/turns.py)."""

    number: int
    facts: msgspec.Raw  # TurnFacts
    orders: msgspec.Raw  # a list of Order


class Unit(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Do a unit of a learner's work: rank 0 does it, too. Turns and units are numbered together."""

    number: int
    ask: bytes = b""  # what the work is, with its first unit


class UnitPart(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The beginning of what the next unit asks, which is long."""

    ask: bytes


# -- talk: what rank 0 says


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """All ranks are here: load the model, with rank 0's settings."""

    config: EngineConfig  # but for where the model is
    adapters: SlotConfig | None  # None: ranks that only learn
    places: list[list[str]]  # of the ranks, as the backend wants them (backend.py)
    backend: str


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Have the file of an adapter version on your disk."""

    number: int  # to answer by
    manifest: AdapterManifest


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Sign of life of rank 0, sent regularly."""


class GroupEnd(msgspec.Struct, frozen=True, tag=True):
    """The worker ends in order, or the group does, and why."""

    reason: str = ""
    is_setup: bool = False  # the operator has to change something first


FromLead = LoadModel | Fetch | Alive | GroupEnd


# -- talk: what a follower says


class ModelLoaded(msgspec.Struct, frozen=True, tag=True):
    """It has loaded its part of the model."""

    weights: str  # hash of the model's files
    tokenizer: str
    kv_bytes_per_token: int
    vision: VisionSpec | None = None  # what images are prepared for


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """The file is here, or why not."""

    number: int
    fault: str = ""


class TurnsTaken(msgspec.Struct, frozen=True, tag=True):
    """It lives; the latest turn that it has taken, and a sum over all that came of its turns until then."""

    turn: int = 0
    sum: int = 0
    machine: MachineStatus = MachineStatus()  # its memory


class Read(msgspec.Struct, frozen=True, tag=True):
    """Adapter versions that this rank has read its part of, and those that it could not read."""

    read: tuple[str, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()


class Woken(msgspec.Struct, frozen=True, tag=True):
    """A thread of it has something for the next turn."""


class UnitFailed(msgspec.Struct, frozen=True, tag=True):
    """A unit of work has failed here, as it may have everywhere: where it is the data's fault."""

    number: int
    reason: str


class Stopping(msgspec.Struct, frozen=True, tag=True):
    """It was asked to end, and does when rank 0 has ended in order."""


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The follower ends, with the reason."""

    reason: str
    is_setup: bool = False


FromFollower = ModelLoaded | Fetched | TurnsTaken | Read | Woken | UnitFailed | Stopping | Lost
