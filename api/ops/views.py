"""What a snapshot of the ring holds: plain data, for the dashboard, `mlx_parallm top` and `GET /v1/ring/snapshot`."""

import msgspec

from shared.jobs import JobStatus
from shared.redis.adapter_catalog import AdapterSummary
from shared.redis.ring_history import RingSample
from shared.redis.worker_registry import WorkerStatus
from shared.training import TrainerStatus


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


class TrainingView(msgspec.Struct, frozen=True):
    """A policy's training."""

    status: TrainerStatus
    alive: bool
    alerts: dict[str, int]


class RingSnapshot(msgspec.Struct, frozen=True):
    """Everything at a glance."""

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
