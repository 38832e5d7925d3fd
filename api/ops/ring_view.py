"""A snapshot of the ring: types that a server sends and the client's commands read.

Nothing here loads FastAPI: a command is to answer at once.
"""

import msgspec

from shared.jobs import JobStatus
from shared.learners import ServiceCard
from shared.redis.adapters.catalog import AdapterSummary
from shared.redis.processes.worker_registry import WorkerStatus
from shared.sequences import SequenceClass
from shared.training import TrainerStatus


class RingSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """The ring at one moment."""

    at_ms: int  # Unix milliseconds, by Redis
    running: int = 0  # rows in use
    waiting: dict[str, int] = {}  # by class
    kv_used: float = 0.0  # 0 to 1
    tokens: float = 0  # totals from here on
    prompt_tokens: float = 0
    ended: dict[str, float] = {}  # "<model>|<class>" -> sequences that have ended
    first_token_s: float = 0  # sum over interactive sequences, and their number
    first_tokens: float = 0
    gap_s: float = 0  # sum of the times between two tokens of interactive sequences, and their number
    gaps: float = 0


class RedisInfo(msgspec.Struct, frozen=True):
    """The server in the middle."""

    version: str
    uptime_s: int
    used_bytes: int
    peak_bytes: int
    limit_bytes: int  # 0: none
    clients: int
    commands_per_s: int
    persistence: str  # "AOF", "RDB" or "none"
    keys: int


class QueueView(msgspec.Struct, frozen=True):
    """One class of one model's queue."""

    model: str
    sequence_class: str
    waiting: int
    leased: int
    oldest_ms: int
    ended_per_s: float  # over the last seconds


class AdapterView(msgspec.Struct, frozen=True):
    """An adapter's pointers, and who computes with which version."""

    summary: AdapterSummary
    loaded: dict[str, int]  # worker -> version


class PlaceView(msgspec.Struct, frozen=True):
    """A host that holds a model, or loads it."""

    host: str  # the machine
    state: str
    progress: float  # of a download or a load
    need_bytes: int


class ModelView(msgspec.Struct, frozen=True):
    """A model of the catalogue."""

    name: str
    state: str
    pinned: bool
    size_bytes: int  # of its weights; 0: not known
    places: list[PlaceView]
    waiting: dict[SequenceClass, int]
    running: int
    why: str  # no host can load it


class TrainingView(msgspec.Struct, frozen=True):
    """State of a policy's training on the first page."""

    status: TrainerStatus
    alive: bool
    alerts: dict[str, int]


class RingSnapshot(msgspec.Struct, frozen=True):
    """All figures of the first page, read at one time."""

    at_ms: int  # Unix milliseconds, by Redis
    redis: RedisInfo
    models: list[str]
    workers: list[WorkerStatus]
    queues: list[QueueView]
    jobs: list[JobStatus]  # the newest
    jobs_active: int
    adapters: list[AdapterView]
    trainings: list[TrainingView]
    dead_letters: int
    tokens_per_s: float  # decoded, over the last heartbeats
    history: list[RingSample] = []
    services: list[ServiceCard] = []  # training services that live, one of each model
    catalogue: list[ModelView] = []
    troubles: list[str] = []  # processes that end again and again, or have not begun: a model is downloaded
