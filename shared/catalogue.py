"""The catalogue: the models that a ring may serve, and which host holds which of them now.

**entry** a model of the catalogue: where its weights are, and what its operator wants of it · **host** a process that
holds no model itself; it starts one worker for each model that it holds · **order** what an operator asks of hosts:
load this model, unload it · **demand** what waits for a model in its queue.

Who fills what: an operator (`mlx_parallm models add`) or a host that was given the model (`--model`) writes the
`CatalogueEntry`; a host that has looked at the files fills in its figures, and writes a `HostStatus` with every
heartbeat; `shared/redis/processes/catalogue.py` stores all of it and counts a `ModelDemand` from the queue. Which host
loads what is decided from exactly these (worker/host/placement.py).
"""

import re
from typing import Annotated, Literal

import msgspec

from shared.errors import InvalidRequestError
from shared.sequences import SequenceClass

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9][A-Za-z0-9._-]{0,127})?"
MOST_ENTRIES = 1024
RETRY_S = 60.0  # after a load that has failed, until its host tries it again
MOST_ALIASES = 32  # of one entry
LONGEST_SOURCE = 1024
DRAFT = "draft-model"  # an option: name of another model of the catalogue, which drafts for this one
# Flags of a worker that an entry may set: none that names a file, an address or code
OPTIONS = (
    DRAFT,
    "adapter-rank", "adapter-slots", "block-size", "dtype", "interactive-share", "kv-bits", "kv-group-size",
    "kv-memory-gb", "max-batch-size", "max-context", "max-kv-size", "num-speculative-tokens", "prefill-batch-size",
    "prefill-chunk", "prefix-cache-gb", "reasoning-format", "reserved-interactive-rows", "share-prompts", "spec-decode",
    "tool-format", "warm-up",
)  # fmt: skip

HeldState = Literal["downloading", "loading", "ready", "unloading", "failed"]
OrderKind = Literal["load", "unload"]


class CatalogueEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that the ring may serve."""

    name: str  # as requests call it
    source: str  # folder, GGUF file or hub name, as a worker's --model takes it
    aliases: tuple[str, ...] = ()  # other names of it, which no other entry has
    size_bytes: int = 0  # of the weights in memory; 0: no host has looked at them yet
    context: int = 0  # prompt and completion, in tokens; 0: not known
    family: str = ""  # `model_type` of its configuration; "": not known
    sha256: str = ""  # `base_sha256` of its card; with a value from the operator, other weights are refused
    pinned: bool = False  # a host that holds it never unloads it for another one, and one host always holds it
    priority: int = 0  # of two models that want the same memory, the one with the higher number has it
    idle_s: float = 0.0  # after so long without a request it is unloaded; 0: the host's own default
    ranks: int = 1  # processes that hold it together; more than 1: a group serves it, and no host loads it
    options: dict[str, str] = {}  # of OPTIONS, for its worker: {"kv-bits": "8"}
    added_ms: int = 0  # Unix time

    @property
    def names(self) -> tuple[str, ...]:
        """All its names: first its own, then its aliases."""
        return (self.name, *self.aliases)

    def checked(self) -> "CatalogueEntry":
        """The entry itself; InvalidRequestError for one that no ring can serve, with the field in `param`."""
        for field, wrong in self._faults():
            raise InvalidRequestError(wrong, param=field)
        return self

    def _faults(self) -> list[tuple[str, str]]:
        faults = [
            ("aliases" if i else "name", f"{name[:80]!r} is not a name of a model: letters, digits, '.', '_' and '-'")
            for i, name in enumerate(self.names)
            if not re.fullmatch(NAME, name)
        ]
        if not 0 < len(self.source.strip()) <= LONGEST_SOURCE or not self.source.isprintable():
            faults.append(("source", "the source is a folder, a GGUF file or a name of the hub, as --model takes it"))
        if len(self.aliases) > MOST_ALIASES:
            faults.append(("aliases", f"a model has at most {MOST_ALIASES} aliases"))
        if len(set(self.names)) < len(self.names):
            faults.append(("aliases", "an alias is given twice, or is the model's own name"))
        if self.sha256 and not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            faults.append(("sha256", "sha256 has 64 hexadecimal digits"))
        if not 0 <= self.idle_s <= 1e9:
            faults.append(("idle_s", "idle_s is a number of seconds, 0 for the host's default"))
        if not 1 <= self.ranks <= 1024:
            faults.append(("ranks", "ranks is a number of processes from 1 to 1024"))
        if abs(self.priority) > 1_000_000:
            faults.append(("priority", "priority is a whole number from -1000000 to 1000000"))
        if unknown := sorted(set(self.options).difference(OPTIONS)):
            known = ", ".join(OPTIONS)
            faults.append(("options", f"'{unknown[0][:40]}' is not an option of a model; these are: {known}"))
        if not all(re.fullmatch(r"[A-Za-z0-9._-]{1,64}", value) for value in self.options.values()):
            faults.append(("options", "the value of an option has letters, digits, '.', '_' and '-'"))
        return faults


class HeldModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that a host holds, fetches or loads, or has failed to."""

    name: str
    state: HeldState
    progress: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # of a download or a load
    since_ms: int = 0  # Unix time at which the state began
    need_bytes: int = 0  # memory that it takes on this host
    load_s: float = 0.0  # measured, from when its memory was free until its worker was ready; 0: not measured yet
    worker: str = ""  # id of the worker that holds it; "": none yet
    used_ms: int = 0  # Unix time of its last use
    why: str = ""  # it failed, for people


class PastModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that a host has held: its files, and perhaps KV and adapters of it, are near to this machine."""

    load_s: float = 0.0  # measured at its last load here
    left_ms: int = 0  # Unix time at which the host let it go; 0: it holds it


class HostStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """One heartbeat of a host."""

    id: str
    host: str  # name of the machine
    pid: int
    heartbeat_ms: int  # Unix time
    memory_bytes: int = 0  # that all models together may take here
    free_bytes: int = 0  # of these, not taken by a model that it holds or loads
    most_models: int = 0  # that it holds at once; 0: as many as fit
    # Models of the catalogue that it can load, since it has the files or may fetch them, and the bytes of memory that
    # each takes here; 0: not known yet
    offers: dict[str, int] = {}
    refuses: dict[str, str] = {}  # models whose files it has and cannot load, and why
    unseen: tuple[str, ...] = ()  # models whose files it is about to look at: it may offer or refuse them in seconds
    held: tuple[HeldModel, ...] = ()
    draining: bool = False  # it is about to end, and loads nothing
    past: dict[str, PastModel] = {}  # by model
    weights_address: str = ""  # where other hosts fetch the weights that it has; "": nowhere

    def holds(self, model: str) -> HeldModel | None:
        """A model in any state; None for one that it neither holds nor loads."""
        return next((each for each in self.held if each.name == model), None)


class ModelOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """A load or an unload that an operator asks for; a host that has done it takes it off the list."""

    id: str
    kind: OrderKind
    model: str
    host: str = ""  # id of the host that is to do it; "": any, as placement decides
    at_ms: int = 0  # Unix time


class ModelDemand(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sequences that wait for one model of the catalogue, or run on it."""

    name: str
    # Sequences that no worker has, without those whose deadline has passed; with those whose worker has died
    waiting: dict[SequenceClass, int] = {}
    running: dict[SequenceClass, int] = {}  # leased by a worker that lives
    oldest_ms: dict[SequenceClass, int] = {}  # age of the oldest one that waits
    deadline_ms: int = 0  # the earliest of those that wait, Unix time; 0: none has one
    orders: tuple[ModelOrder, ...] = ()

    def waits(self, kind: SequenceClass) -> int:
        """How many of a class wait."""
        return self.waiting.get(kind, 0)


class RingModels(msgspec.Struct, frozen=True):
    """All facts about the models of a ring, read in one round trip."""

    now_ms: int  # Unix time, by Redis' clock
    entries: dict[str, CatalogueEntry]
    hosts: tuple[HostStatus, ...]  # that live, by id
    orders: tuple[ModelOrder, ...]
    loading: dict[str, str]  # model -> id of the host that has the lease to load it
    loads: dict[str, int]  # model -> how many loads of it have begun in all: `CatalogueStore.take_load`

    def named(self, name: str) -> CatalogueEntry | None:
        """The entry of a name or an alias."""
        entry = self.entries.get(name)
        return entry or next((each for each in self.entries.values() if name in each.aliases), None)

    def holding(self, model: str) -> list[tuple[HostStatus, HeldModel]]:
        """Hosts that hold a model, in any state."""
        return [(host, held) for host in self.hosts if (held := host.holds(model)) is not None]


EMPTY = RingModels(0, {}, (), (), {}, {})
