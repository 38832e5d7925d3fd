"""What a heartbeat says of a worker."""

import os
import socket
from dataclasses import asdict, dataclass

from shared.redis.worker_registry import WorkerState, WorkerStatus, weights_of
from shared.sequences import ModelCard
from shared.settings import WorkerSettings
from worker.engine.adapters import AdapterStats
from worker.engine.messages import EngineStats
from worker.running import now_ms

ROWS_OF = "adapter_rows:"  # before a version: rows that use it
WAITS_FOR = "adapter_waits:"  # before a version: rows wait for it


@dataclass(frozen=True)
class Identity:
    """What stays the same while a worker lives."""

    id: str
    card: ModelCard
    started_ms: int


def worker_status(
    who: Identity,
    settings: WorkerSettings,
    stats: EngineStats,
    adapters: AdapterStats,
    *,
    state: WorkerState,
    pause: str,
    loaded: dict[str, int],
    tokens_per_s: float,
    silent_s: float,
) -> WorkerStatus:
    """The heartbeat of this moment."""
    return WorkerStatus(
        id=who.id,
        model=who.card.name,
        host=socket.gethostname(),
        pid=os.getpid(),
        state=state,
        pause=pause,
        weights=weights_of(who.card),
        rows=stats.rows,
        max_rows=settings.max_batch_size,
        waiting=stats.waiting,
        kv_bytes=stats.kv_bytes,
        kv_limit_bytes=stats.kv_limit_bytes,
        tokens_per_s=tokens_per_s,
        steps=stats.steps,
        started_ms=who.started_ms,
        heartbeat_ms=now_ms(),
        adapters=loaded,
        engine_silent_s=round(min(silent_s, 1e9), 1),
        versions=tuple(adapters.loaded),
        extra=_extra(who.card, settings, stats, adapters),
    )


def _extra(card: ModelCard, settings: WorkerSettings, stats: EngineStats, adapters: AdapterStats) -> dict[str, float]:
    prefix: dict[str, float] = {f"prefix_{name}": value for name, value in asdict(stats.prefix).items()}
    room = max(0.0, settings.prefix_cache_gb * 1e9 - stats.prefix.bytes)
    return {
        **prefix,
        "prefix_free_blocks": room // (settings.block_size * max(1, card.kv_bytes_per_token)),
        "adapter_slots": settings.adapter_slots,
        "adapter_slots_used": len(adapters.loaded),
        **{f"{ROWS_OF}{version}": rows for version, rows in adapters.loaded.items()},
        **{f"{WAITS_FOR}{version}": 1 for version in adapters.waited_for},
        **({f"guest_{name}": value for name, value in asdict(stats.guests).items()} if settings.guest else {}),
    }
