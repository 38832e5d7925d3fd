"""Adapters: names, versions, references to them, and the store's facts about each version.

**adapter** a named LoRA or DoRA, heads (shared/heads.py), or both; or a network (shared/networks/), which no language
model is the base of · **adapter version** `name@k`, immutable, k
increasing, never reused · **reference** what a request writes into `model` or `adapter`: `name` (the latest version),
`name@k` (that one), or a weighted split `name@12:0.9,name@13:0.1`, of which one choice is taken by a hash of the
session, so that a session stays with it.

Who fills what: `shared/adapter_files/formats.py` reads an adapter directory into a `PreparedAdapter`; the store
(`shared/redis/adapters/store.py`) turns that into an `AdapterManifest`, the durable description of one version.
"""

import hashlib
import math
import re
from pathlib import Path
from typing import Literal

import msgspec

from shared.errors import InvalidRequestError, UnknownAdapterError
from shared.heads import HeadSpec
from shared.networks.spec import NetworkSpec

SCHEMA = 1
MAX_CHOICES = 16

AdapterKind = Literal["lora", "dora", "head", "network"]  # head: heads alone, without LoRA
LoraKind = Literal["lora", "dora"]  # of those, what has A and B; dora: arXiv 2402.09353, with a magnitude an output
AdapterStatus = Literal["published", "rejected"]
AdapterChange = Literal["seen", "published", "promoted", "rolled_back", "rejected", "deleted"]
ModuleShapes = dict[str, tuple[int, int]]  # module path -> (in, out)

NETWORK_BASE = "network"  # in the place of a base model's hash: a network has none, and a name is one or the other
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"  # of an adapter, a policy or a checkpoint: a file may be called so, too
_CHOICE = re.compile(r"(?P<name>[^@:,]+)(?:@(?P<version>[1-9][0-9]{0,8}))?(?::(?P<weight>[0-9.eE+-]{1,24}))?")


class GateCheck(msgspec.Struct, frozen=True):
    """One check that a version passed or failed before it could become the latest."""

    name: str
    passed: bool
    detail: str = ""
    value: float | None = None  # what was measured, where it has a bound


class AdapterManifest(msgspec.Struct, frozen=True):
    """Everything about one adapter version but its bytes. The bytes are mlx-lm's `adapters.safetensors`."""

    name: str
    version: int
    kind: AdapterKind
    rank: int
    scale: float  # the factor on B A x: mlx-lm's `scale`, PEFT's alpha / r
    modules: tuple[str, ...]  # paths as in the file, such as "model.layers.0.self_attn.q_proj"
    base_sha256: str  # of the base model; "": not known
    parent: int  # the version that this one was made from; 0: none
    sha256: str  # of the bytes
    size: int
    chunk_size: int
    created_ms: int  # Unix time
    train_step: int = 0
    metrics: dict[str, float] = {}
    status: AdapterStatus = "published"
    gate: tuple[GateCheck, ...] = ()
    source: str = ""  # where it came from: "upload", "trainer", a folder
    schema: int = SCHEMA
    tenant: str = ""  # who owns the adapter; "": it is there for all
    heads: dict[str, HeadSpec] = {}
    network: NetworkSpec | None = None  # kind "network"

    @property
    def id(self) -> str:
        """Name and number of the version, as `name@k`."""
        return version_id(self.name, self.version)

    @property
    def chunks(self) -> int:
        """Number of chunks that hold the bytes."""
        return -(-self.size // self.chunk_size)


class PreparedAdapter(msgspec.Struct, frozen=True):
    """A checked adapter on disk, in mlx-lm's layout, ready to be published."""

    path: Path  # of the safetensors file
    kind: AdapterKind
    rank: int
    scale: float
    modules: tuple[str, ...]
    sha256: str
    size: int
    heads: dict[str, HeadSpec] = {}
    network: NetworkSpec | None = None


class AdapterEvent(msgspec.Struct, frozen=True):
    """A change of an adapter, as a hint: the pointer in the store is the truth."""

    name: str
    change: AdapterChange
    version: int  # that the change is about
    latest: int  # after the change; 0: none
    at_ms: int = 0


class AdapterChoice(msgspec.Struct, frozen=True):
    """One target of a reference; `version` 0 means the latest."""

    name: str
    version: int = 0
    weight: float = 1.0

    @property
    def follows(self) -> bool:
        """True if the reference names no version, so that it moves on to newer ones."""
        return self.version == 0

    def __str__(self) -> str:
        return version_id(self.name, self.version) if self.version else self.name


class AdapterRef(msgspec.Struct, frozen=True):
    """A parsed reference: one choice, or several with weights."""

    choices: tuple[AdapterChoice, ...]

    @classmethod
    def parse(cls, text: str) -> "AdapterRef":
        """Read `name`, `name@k` or `name@k:weight,...`; InvalidRequestError states the reason."""
        parts = text.split(",")
        if len(parts) > MAX_CHOICES:
            raise InvalidRequestError(f"adapter split of {len(parts)} choices; at most {MAX_CHOICES} are taken")
        choices = tuple(_parse_choice(part.strip(" "), text, split=len(parts) > 1) for part in parts)
        if len({(choice.name, choice.version) for choice in choices}) < len(choices):
            raise InvalidRequestError(f"adapter split {text!r} names the same version twice")
        return cls(choices)

    def choose(self, session: str) -> AdapterChoice:
        """The choice of this session: always the same one, and over many sessions by weight.

        The choices' order is that of the text, so that shifting weight from one to its neighbour moves only the
        sessions between the two cuts.
        """
        total = sum(choice.weight for choice in self.choices)
        draw = int.from_bytes(hashlib.sha256(session.encode()).digest()[:8], "big") / 2**64 * total
        for choice in self.choices:
            draw -= choice.weight
            if draw < 0:
                return choice
        return self.choices[-1]

    def __str__(self) -> str:
        if len(self.choices) == 1:
            return str(self.choices[0])
        return ",".join(f"{choice}:{choice.weight!r}" for choice in self.choices)


class ResolvedAdapter(msgspec.Struct, frozen=True):
    """Version that a reference currently selects."""

    name: str
    version: int
    follows: bool  # the reference names no version
    manifest: AdapterManifest

    @property
    def id(self) -> str:
        """Name and number of the version, as `name@k`."""
        return version_id(self.name, self.version)


def version_id(name: str, version: int) -> str:
    """Format a version's id as `name@k`."""
    return f"{name}@{version}"


def unknown_adapter(name: str) -> UnknownAdapterError:
    """The error for an adapter that is not there."""
    return UnknownAdapterError(f"there is no adapter {name!r}")


def check_language(manifest: AdapterManifest) -> None:
    """InvalidRequestError when the version is no adapter of a language model."""
    if manifest.network is not None:
        raise InvalidRequestError(
            f"{manifest.id} is a network and no language model: /v1/predict and /v1/rl/act ask it", param="model"
        )


def not_yours(name: str) -> UnknownAdapterError:
    """The error for making an adapter or a policy under a name that another tenant has."""
    return UnknownAdapterError(f"there is no adapter {name!r} of yours, and the name is not free: choose another one")


def check_name(name: str) -> str:
    """The name, if it is one: letters, digits, `.`, `_`, `-`, at most 64, the first a letter or digit."""
    if not re.fullmatch(NAME, name):
        raise InvalidRequestError(
            f"{name[:80]!r} is no adapter name: at most 64 letters, digits, '.', '_', '-', the first a letter or digit"
        )
    return name


def _parse_choice(part: str, text: str, *, split: bool) -> AdapterChoice:
    match = _CHOICE.fullmatch(part)
    if match is None and part.endswith(":auto"):
        raise InvalidRequestError(
            f"{text[:200]!r}: shares that rewards move are set for an adapter with PUT /v1/adapters/NAME/split; "
            "requests then name the adapter alone"
        )
    if match is None:
        raise InvalidRequestError(
            f"{text[:200]!r} is no adapter reference: write name, name@version or a@1:0.9,b@2:0.1"
        )
    name, version, weight = check_name(match["name"]), int(match["version"] or 0), match["weight"]
    if not split:
        if weight is not None:
            raise InvalidRequestError(f"{text!r}: a weight needs at least two choices, as in a@1:0.9,a@2:0.1")
        return AdapterChoice(name, version)
    if weight is None:
        raise InvalidRequestError(f"{text[:200]!r}: every choice of a split needs a weight, as in a@1:0.9,a@2:0.1")
    return AdapterChoice(name, version, _parse_weight(weight))


def _parse_weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (0 < weight <= 1e6):
        raise InvalidRequestError(f"{text!r} is no weight: a number above 0, at most 1000000")
    return weight
