"""Probes: /livez (this process), /readyz (somebody can answer), /health (how the ring is).

Utilization is the used share of a bound: waiting sequences of `--max-queue-size`, running requests of
`--max-concurrent-requests`, KV memory of `--memory-pressure-threshold`. The highest share decides: degraded from 72%,
overloaded from 100%, where new requests are refused. A probe never waits for a Redis that is away.
"""

import asyncio
import time
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Response
from msgspec import structs, to_builtins
from pydantic import BaseModel, Field
from redis.exceptions import RedisError

from api.load import ProcessLoad
from api.ring.cold_models import ModelState, obstacle, state_of
from api.ring.ring import SERVING, Ring, ring_of
from shared.redis.connection.faults import is_refusal, reason
from shared.redis.processes.child_troubles import ChildTroubles
from shared.redis.processes.pause import PauseMode, PauseSwitch
from shared.redis.processes.worker_registry import WorkerStatus
from shared.redis.training.board import live_trainers
from shared.training import TrainerStatus

router = APIRouter(tags=["operations"])
TheRing = Annotated[Ring, Depends(ring_of)]

DEGRADED_FROM = 0.72  # of a bound
SILENT_S = 10.0  # of an engine that has work; reported, though it may be a long prompt
ANSWER_WITHIN_S = 2.0  # Redis
NO_WORKER = "no worker is there"
NO_ANSWER: frozenset[ModelState] = frozenset({"failed", "unavailable"})

Status = Literal["ok", "paused", "degraded", "overloaded", "shutting_down"]


class CacheHealth(BaseModel):
    """A tier of a worker's prefix cache: KV of earlier prompts, in memory or in files."""

    bytes: int = Field(description="in use; of files those of all workers that share the folder")
    limit_bytes: int = Field(description="0: no bound")
    hits: int = Field(description="prompts that it had KV for, since the worker's start")
    evicted: int = Field(description="blocks, or files, that went for room or age")
    dropped: int = Field(default=0, description="files that were not written")
    errors: int = Field(default=0, description="of the disk, and damaged files")


class MachineHealth(BaseModel):
    """The machine of a process: its memory, power and heat, and what a worker does about them."""

    memory_total: int = Field(
        default=0, description="bytes; of the control group, where that is tighter; 0: not reported"
    )
    memory_available: int = 0
    footprint: int = Field(default=0, description="bytes that the process holds")
    gpu_total: int = Field(default=0, description="bytes of a GPU that has its own; 0: it computes in the machine's")
    gpu_available: int = 0
    gpu_held: int = Field(default=0, description="bytes of it that the process holds")
    pressure: str = Field(default="normal", description="normal, warning or critical")
    relief: str = Field(default="", description="what the worker gives up meanwhile; empty: nothing")
    most_rows: int = Field(default=-1, description="rows that it fills at present; -1: all of them")
    power: str = Field(default="unknown", description="mains, battery or unknown")
    charge: int = Field(default=-1, description="percent; -1: no battery")
    thermal: str = Field(default="unknown", description="nominal, fair, serious, critical or unknown")


class RankHealth(BaseModel):
    """One of the processes that hold a model together, a worker's or a trainer's."""

    rank: int = Field(description="0 is the process that leads, which alone speaks to the ring")
    host: str
    address: str = Field(description="where it is reached, or speaks from")
    sums_by: str = Field(description="how it exchanges sums with the others: ring, nccl or jaccl")
    state: str = Field(description="loading, ready or lost")
    behind: int = Field(description="turns of the engine, or units of a learner's work, that it has not reported yet")
    silent_s: float = Field(description="seconds since its last message")
    machine: MachineHealth = Field(description="memory of a rank but 0, whose process reports its own")


class WorkerHealth(BaseModel):
    """State of a live worker, as it has reported it."""

    id: str
    model: str
    host: str
    state: str = Field(description="starting, ready, paused, draining or stuck")
    engine_silent_s: float = Field(description="since the engine's turn under way began; 0: idle")
    warms_up: bool = Field(
        description="it serves, and measures and compiles while it is idle: first tokens may be slow"
    )
    rows: int = Field(description="rows in use")
    max_rows: int
    tokens_per_s: float
    kv_bytes: int
    kv_limit_bytes: int
    kv_spared_bytes: int = Field(description="that rows do not take because they share what they begin with")
    speculation: str = Field(description="--spec-decode as it is in force; none, and why, where the model cannot")
    draft_model: str = Field(description="the model that drafts; empty: there is none, or it has failed")
    memory_cache: CacheHealth
    ssd_cache: CacheHealth | None = Field(description="null: no folder is named")
    ranks: list[RankHealth] = Field(description="that hold the model together; empty: this process holds all of it")
    machine: MachineHealth
    court: str = Field(
        default="",
        description="how other workers found its tokens: wrong (two of them), disputed (one of them); empty: right, or "
        "not checked",
    )


class TrainerHealth(BaseModel):
    """State of a live trainer, as it has reported it."""

    policy: str
    run: str
    state: str = Field(description="starting, waiting, training or paused")
    ranks: list[RankHealth] = Field(description="that divide the model among them; empty: it is one process")
    machine: MachineHealth


class ServiceHealth(BaseModel):
    """A training service that lives (`mlx_parallm_learners`), as it has reported itself; one for each model."""

    id: str
    model: str
    learners: int = Field(description="in its memory")
    max_learners: int
    machine: MachineHealth


class ModelHealth(BaseModel):
    """Queue and workers of one model that a worker serves, or of the catalogue."""

    state: ModelState = Field(
        description="ready: it answers now; downloading, loading, unloading; loadable: on request; failed, unavailable"
    )
    why: str = Field(default="", description="no host can load it; empty: one can, or a worker serves it")

    waiting: dict[str, int] = Field(description="sequences that no worker has taken yet, by class")
    leased: dict[str, int] = Field(description="sequences in workers' hands, by class")
    oldest_ms: int = Field(description="age of the one that waits longest")
    memory: float = Field(description="share of KV memory given out by the worker with most room")
    kv: str = Field(
        description="how KV is quantised, and how many of a row's caches, or how it is bounded; empty: neither"
    )


class Utilization(BaseModel):
    """The used share of each bound, from 0 to 1 and more; of the fullest model."""

    queue: float
    requests: float = Field(description="of this api process")
    memory: float


class EventLoop(BaseModel):
    """The event loop of this api process: while it stands still, no client gets a token."""

    lag_s: float = Field(description="how late it comes at present")
    longest_stop_s: float = Field(description="its longest stop within the last minute")


class RingHealth(BaseModel):
    """State of one ring, with the reasons of any trouble."""

    status: Status
    reasons: list[str] = Field(description="why it is not ok")
    paused: PauseMode | None = Field(default=None, description="the pause in force, by POST /pause")
    model_loaded: bool = Field(description="a worker is ready, or paused")
    queue_depth: int = Field(description="waiting sequences in all")
    utilization: Utilization
    workers: list[WorkerHealth]
    trainers: list[TrainerHealth]
    training_services: list[ServiceHealth]
    models: dict[str, ModelHealth]


class Health(RingHealth):
    """How the api process and its ring are. `overloaded` and `shutting_down` answer with 503."""

    event_loop: EventLoop
    api: str = Field(description="id of this api process")
    rings: dict[str, RingHealth] = Field(default_factory=dict, description="the others that it serves (`--ring`)")


@router.get("/health", summary="How the ring is", responses={503: {"model": Health, "description": "Not well"}})
async def health(ring: TheRing, response: Response) -> Health:
    """Workers, models and queues, read from Redis; one ring of several that is away leaves the others as they are."""
    own, *others = await asyncio.gather(*(_report(each) for each in ring.all))
    load = ring.load
    report = Health(
        **dict(own),
        event_loop=EventLoop(lag_s=round(load.lag_s, 4), longest_stop_s=round(load.longest_stop_s, 4)),
        api=ring.api_id,
        rings={each.name: said for each, said in zip(ring.others, others, strict=True)},
    )
    if others:
        _judge_all(report, load)
    if ring.shutting_down:
        report.status = "shutting_down"
    if report.status in ("overloaded", "shutting_down"):
        response.status_code = 503
    return report


async def _report(ring: Ring) -> RingHealth:
    report = RingHealth(
        status="ok",
        reasons=[],
        model_loaded=False,
        queue_depth=0,
        utilization=Utilization(queue=0, requests=round(ring.load.utilization, 4), memory=0),
        workers=[],
        trainers=[],
        training_services=[],
        models={},
    )
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            await _look(ring, report)
    except (RedisError, OSError) as error:  # TimeoutError is an OSError
        report.status = "overloaded"
        report.reasons.append(_of_redis(error))
    else:
        if ring.frames.refusal:
            report.reasons.append(f"Redis refuses writes: {ring.frames.refusal}")
        _judge(report, ring.load)
    return report


def _judge_all(report: Health, load: ProcessLoad) -> None:
    """The front is overloaded when it, or each of its rings, is; what ails one of them degrades it."""
    said = [f"ring '{name}': {reason}" for name, each in report.rings.items() for reason in each.reasons]
    is_empty = report.reasons == [NO_WORKER]  # a ring of keys and limits alone is none that is ill
    statuses = {report.status, *(each.status for each in report.rings.values())}
    if is_empty:
        report.reasons = []
        statuses = {each.status for each in report.rings.values()}
    report.reasons += said
    report.model_loaded = report.model_loaded or any(each.model_loaded for each in report.rings.values())
    if statuses == {"overloaded"} or load.utilization >= 1:
        report.status = "overloaded"
    elif len(statuses) == 1:
        (report.status,) = statuses
    else:
        report.status = "degraded" if report.reasons else "ok"


def _of_redis(error: Exception) -> str:
    return f"Redis {'refuses writes' if is_refusal(error) else 'does not answer'}: {reason(error)}"


async def _look(ring: Ring, report: RingHealth) -> None:
    """Fill in what Redis says."""
    settings = ring.settings
    models = await ring.catalogue.read()
    kinds = {card.name: card.kv for card in await ring.registry.models()}
    for name in dict.fromkeys((*kinds, *models.entries)):
        workers, entry = await ring.registry.workers(name), models.entries.get(name)
        if not workers and entry is None:
            continue
        answers = any(worker.state in SERVING for worker in workers)
        why_not = None if answers or entry is None else obstacle(models, entry)
        report.workers += [_worker(worker) for worker in workers]
        report.reasons += [note for each in workers for note in _troubles(f"worker '{each.id}'", each)]
        depth = await ring.queue(name).depth()
        memory = _memory(workers)
        report.models[name] = ModelHealth(
            state="ready" if answers else "unavailable" if entry is None else state_of(models, entry),
            why="" if why_not is None else why_not.reason,
            waiting={kind: queue.waiting for kind, queue in depth.items()},
            leased={kind: queue.leased for kind, queue in depth.items()},
            oldest_ms=max((queue.oldest_ms for queue in depth.values()), default=0),
            memory=round(memory, 4),
            kv=kinds.get(name, ""),
        )
        if why_not is not None and models.hosts:
            report.reasons.append(f"no host can load model '{name}': {why_not.reason}")
        report.queue_depth += sum(queue.waiting for queue in depth.values())
        use, waiting = report.utilization, depth["interactive"].waiting
        use.queue = max(use.queue, round(waiting / settings.max_queue_size, 4))
        if settings.memory_pressure_threshold:
            use.memory = max(use.memory, round(memory / settings.memory_pressure_threshold, 4))
        if not answers and entry is None:
            report.reasons.append(f"no worker of model '{name}' takes work")
    if models.entries and not models.hosts:
        report.reasons.append("no host is running that could load models of the catalogue")
    trainers = await live_trainers(ring.redis, time.time_ns() // 1_000_000)
    report.trainers = [TrainerHealth.model_validate(to_builtins(trainer)) for trainer in trainers]
    report.reasons += [note for each in trainers for note in _troubles(f"the trainer of policy '{each.policy}'", each)]
    services = await ring.learners.services(sorted(await ring.registry.names()))
    report.training_services = [ServiceHealth.model_validate(to_builtins(service)) for service in services]
    report.reasons += [
        f"the training service of '{each.model}': {trouble}" for each in services for trouble in each.machine.troubles
    ]
    report.model_loaded = any(worker.state in SERVING for worker in report.workers)
    report.reasons += [trouble.message for trouble in await ChildTroubles(ring.redis).read()]
    order = await PauseSwitch(ring.redis).current()
    report.paused = None if order is None else order.mode


def _worker(worker: WorkerStatus) -> WorkerHealth:
    said = worker.extra
    memory = CacheHealth(
        bytes=int(said.get("prefix_bytes", 0)),
        limit_bytes=int(said.get("prefix_limit_bytes", 0)),
        hits=int(said.get("prefix_hits", 0)),
        evicted=int(said.get("prefix_evicted_blocks", 0)),
    )
    names = CacheHealth.model_fields
    files = {name: int(said.get(f"disk_{name}", 0)) for name in names} if "disk_bytes" in said else None
    caches = {"memory_cache": memory, "ssd_cache": files and CacheHealth(**files)}
    nested = {"ranks": to_builtins(worker.ranks), "machine": to_builtins(worker.machine)}
    more = caches | nested | {"warms_up": bool(said.get("warms_up"))}
    more |= {"kv_spared_bytes": int(said.get("kv_spared_bytes", 0))}
    return WorkerHealth.model_validate(structs.asdict(worker) | more)


def _troubles(name: str, process: WorkerStatus | TrainerStatus) -> list[str]:
    """Troubles of a process's machine and of its other ranks' machines, each with the name of the process."""
    machines = {name: process.machine, **{f"rank {rank.rank} of {name}": rank.machine for rank in process.ranks}}
    return [f"{whose}: {trouble}" for whose, machine in machines.items() for trouble in machine.troubles]


def _memory(workers: list[WorkerStatus]) -> float:
    shares = (worker.kv_bytes / max(1, worker.kv_limit_bytes) for worker in workers if worker.state in SERVING)
    return min(shares, default=0.0)


def _judge(report: RingHealth, load: ProcessLoad) -> None:
    """Status and reasons from the figures."""
    for bound, used in report.utilization:
        if used >= DEGRADED_FROM:
            report.reasons.append(f"{bound}: {used:.0%} of the bound")
    if load.stood_still:
        stop = f"{load.longest_stop_s:.1f} s"
        report.reasons.append(f"the event loop of this api process stood still for {stop} within the last minute")
    for worker in report.workers:
        if worker.state == "stuck" or worker.engine_silent_s > SILENT_S:
            report.reasons.append(f"the engine of worker '{worker.id}' has been silent for {worker.engine_silent_s} s")
        if worker.court:
            accusers = "two other workers have" if worker.court == "wrong" else "another worker has"
            report.reasons.append(f"{accusers} found tokens of worker '{worker.id}' wrong: see `court` in their logs")
        if lost := _lost(worker.ranks):
            report.reasons.append(f"worker '{worker.id}' has lost rank {lost}, and begins anew")
    for trainer in report.trainers:
        if lost := _lost(trainer.ranks):
            report.reasons.append(f"the trainer of policy '{trainer.policy}' has lost rank {lost}, and ends")
    full = any(used >= 1 for _, used in report.utilization)
    if full or all(model.state in NO_ANSWER for model in report.models.values()):
        report.status = "overloaded"
        report.reasons = report.reasons or [NO_WORKER]
    elif report.reasons:
        report.status = "degraded"
    elif report.paused:
        report.status = "paused"


def _lost(ranks: list[RankHealth]) -> str:
    return ", ".join(f"{rank.rank} ({rank.host})" for rank in ranks if rank.state == "lost")


@router.get("/livez", summary="Is this process alive?")
async def livez() -> dict[str, str]:
    """Answers as long as the process lives."""
    return {"status": "ok"}


@router.get(
    "/readyz",
    summary="Can a request be answered?",
    responses={503: {"description": "No Redis, no worker that takes work, or shutting down"}},
)
async def readyz(ring: TheRing, response: Response) -> dict[str, str]:
    """Redis answers, and a worker takes work or a host can load a model; while it is paused, requests wait."""
    reason = await why_not_ready(ring)
    if reason:
        response.status_code = 503
        return {"status": "not ready", "reason": reason}
    return {"status": "ok"}


async def why_not_ready(ring: Ring) -> str:
    """Why no request could be answered now, by any ring; "" when one could."""
    if ring.shutting_down:
        return "shutting down"
    said = await asyncio.gather(*(_why_not_ready(each) for each in ring.all))
    return (
        ""
        if "" in said
        else said[0]
        if not ring.others
        else "; ".join(f"ring '{each.name}': {why}" for each, why in zip(ring.all, said, strict=True))
    )


async def _why_not_ready(ring: Ring) -> str:
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            for card in await ring.registry.models():
                if any(worker.state in SERVING for worker in await ring.registry.workers(card.name)):
                    return ""
            models = await ring.catalogue.read()
            if any(obstacle(models, entry) is None for entry in models.entries.values()):
                return ""
    except (RedisError, OSError) as error:  # TimeoutError is an OSError
        return _of_redis(error)
    return "no worker takes work"
