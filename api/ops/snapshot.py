"""`GET /v1/ring/snapshot`: the whole ring at one moment, from Redis. Dashboard and `mlx_parallm top` show this.

It is read at most once a second in a process, however many look at it.
"""

import asyncio
import time
from collections import defaultdict
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from api.ops.ring_history import RingHistory
from api.ops.ring_view import (
    AdapterView,
    ModelView,
    PlaceView,
    QueueView,
    RedisInfo,
    RingSample,
    RingSnapshot,
    TrainingView,
)
from api.ring.cold_models import obstacle, state_of
from api.ring.ring import SERVING, Ring, ring_of
from shared.errors import UnknownAdapterError
from shared.redis import keys
from shared.redis.connection.client import infos, server_time_ms
from shared.redis.processes.child_troubles import ChildTroubles
from shared.redis.processes.metric_store import read_totals
from shared.redis.processes.worker_registry import WorkerStatus
from shared.redis.training.board import TrainingBoard, trained_policies
from shared.telemetry.metrics import SUM, series

router = APIRouter(tags=["operations"])

FRESH_S = 1.0
JOBS_SHOWN = 20
RATE_WINDOW_MS = 20_000


class Snapshots:
    """Reads snapshots, and keeps the last one for a second."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._last: RingSnapshot | None = None
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def read(self) -> RingSnapshot:
        """The ring, at most FRESH_S old."""
        async with self._reading:
            if self._last is None or time.monotonic() - self._read_at > FRESH_S:
                self._last = await _read(self._ring)
                self._read_at = time.monotonic()
            return self._last


async def snapshots_of(request: Request) -> Snapshots:
    """The snapshots of the ring that a request is about."""
    snapshots: dict[str, Snapshots] = request.app.state.snapshots
    return snapshots[(await ring_of(request)).name]


TheSnapshots = Annotated[Snapshots, Depends(snapshots_of)]


@router.get(
    "/v1/ring/snapshot",
    summary="The whole ring at a glance",
    response_class=Response,
    responses={
        200: {"description": "Workers, queues, jobs, adapters, training, Redis", "content": {"application/json": {}}}
    },
)
async def ring_snapshot(snapshots: TheSnapshots) -> Response:
    """Read from Redis alone, so any api process answers the same."""
    return Response(msgspec.json.encode(await snapshots.read()), media_type="application/json")


async def _read(ring: Ring) -> RingSnapshot:
    names = await ring.registry.names()
    workers = [worker for name in names for worker in await ring.registry.workers(name)]
    history = await RingHistory(ring.redis).newest()
    totals = await read_totals(ring.redis)
    now_ms = await server_time_ms(ring.redis)
    return RingSnapshot(
        at_ms=now_ms,
        redis=await _redis(ring),
        models=names,
        workers=workers,
        queues=await _queues(ring, names, history, totals, now_ms),
        jobs=await ring.jobs.list(JOBS_SHOWN),
        jobs_active=await ring.redis.zcard(keys.active_jobs()),
        adapters=await _adapters(ring, workers),
        trainings=await trainings(ring),
        services=await ring.learners.services(names),
        dead_letters=sum([await ring.redis.xlen(keys.dead_letters(name)) for name in names]),
        tokens_per_s=sum(worker.tokens_per_s for worker in workers),
        history=history,
        catalogue=await _catalogue(ring, {worker.model for worker in workers if worker.state in SERVING}),
        troubles=[trouble.message for trouble in await ChildTroubles(ring.redis).read()],
    )


async def _catalogue(ring: Ring, served: set[str]) -> list[ModelView]:
    models = await ring.catalogue.read()
    demand = await ring.catalogue.demand(models)
    views = []
    for name, entry in models.entries.items():
        why_not = None if name in served else obstacle(models, entry)
        view = ModelView(
            name=name,
            state="ready" if name in served else state_of(models, entry),
            pinned=entry.pinned,
            size_bytes=entry.size_bytes,
            places=[
                PlaceView(host.host, held.state, held.progress, held.need_bytes) for host, held in models.holding(name)
            ],
            waiting=demand[name].waiting,
            running=sum(demand[name].running.values()),
            why="" if why_not is None else why_not.reason,
        )
        views.append(view)
    return views


async def _redis(ring: Ring) -> RedisInfo:
    servers = await infos(ring.redis)
    info = servers[0]
    persistence = "AOF" if info.get("aof_enabled") else "RDB" if info.get("rdb_last_save_time") else "none"

    def summed(figure: str) -> int:
        return sum(int(info.get(figure, 0)) for info in servers)

    name = "Valkey" if "valkey_version" in info else "Redis"
    return RedisInfo(
        version=f"{name} {info.get('valkey_version', info.get('redis_version', '?'))}"
        + (f", {len(servers)} shards" if len(servers) > 1 else ""),
        uptime_s=int(info.get("uptime_in_seconds", 0)),
        used_bytes=summed("used_memory"),
        peak_bytes=summed("used_memory_peak"),
        limit_bytes=summed("maxmemory"),
        clients=summed("connected_clients"),
        commands_per_s=summed("instantaneous_ops_per_sec"),
        persistence=persistence,
        keys=summed("keys"),
    )


async def _queues(
    ring: Ring, names: list[str], history: list[RingSample], totals: dict[str, float], now_ms: int
) -> list[QueueView]:
    ended = ended_by_queue(totals)
    before = next((sample for sample in reversed(history) if now_ms - sample.at_ms >= RATE_WINDOW_MS), None)
    before = before or (history[0] if history else None)
    views = []
    for name in names:
        for kind, depth in (await ring.queue(name).depth()).items():
            rate = 0.0
            if before is not None and now_ms > before.at_ms:
                queue = f"{name}|{kind}"
                rate = (ended.get(queue, 0) - before.ended.get(queue, 0)) / ((now_ms - before.at_ms) / 1000)
            views.append(QueueView(name, kind, depth.waiting, depth.leased, depth.oldest_ms, max(0.0, rate)))
    return views


async def _adapters(ring: Ring, workers: list[WorkerStatus]) -> list[AdapterView]:
    views = []
    for name in await ring.adapters.names():
        try:
            summary = await ring.adapters.summary(name)
        except UnknownAdapterError:  # deleted just now
            continue
        loaded = {worker.id: worker.adapters[name] for worker in workers if name in worker.adapters}
        views.append(AdapterView(summary, loaded))
    return views


async def trainings(ring: Ring) -> list[TrainingView]:
    """Every policy that was ever trained, the newest first."""
    views = []
    for policy in await trained_policies(ring.redis):
        board = TrainingBoard(ring.redis, policy)
        status = await board.status()
        if status is not None:
            alerts = {str(kind): count for kind, count in (await board.alert_counts()).items()}
            views.append(TrainingView(status, bool(await board.alive()), alerts))
    return views


def ended_by_queue(totals: dict[str, float]) -> dict[str, float]:
    """ "<model>|<class>" -> sequences that have ended since the beginning."""
    ended: dict[str, float] = defaultdict(float)
    for (model, kind), bucket, value in series(totals, "vllm:request_inference_time_seconds"):
        ended[f"{model}|{kind}"] += value if bucket != SUM else 0
    return dict(ended)
