"""Probes: /livez (this process), /readyz (somebody can answer), /health (how the ring is)."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, Field
from redis.exceptions import RedisError

from api.ring import Ring, ring_of

router = APIRouter(tags=["operations"])
TheRing = Annotated[Ring, Depends(ring_of)]

DEGRADED_FROM = 0.72  # of the waiting sequences that are admitted

Status = Literal["ok", "degraded", "overloaded", "shutting_down"]


class WorkerHealth(BaseModel):
    """A live worker."""

    id: str
    model: str
    host: str
    state: str
    rows: int = Field(description="rows in use")
    max_rows: int
    tokens_per_s: float
    kv_bytes: int
    kv_limit_bytes: int


class ModelHealth(BaseModel):
    """A model's queue."""

    waiting: dict[str, int] = Field(description="sequences that no worker has taken yet, by class")
    leased: dict[str, int] = Field(description="sequences in workers' hands, by class")
    oldest_ms: int = Field(description="age of the one that waits longest")


class Health(BaseModel):
    """How the ring is. `overloaded` and `shutting_down` answer with 503."""

    status: Status
    model_loaded: bool = Field(description="a worker is ready")
    queue_depth: int = Field(description="waiting sequences in all")
    workers: list[WorkerHealth]
    models: dict[str, ModelHealth]
    api: str = Field(description="id of this api process")


@router.get("/health", summary="How the ring is", responses={503: {"model": Health, "description": "Not well"}})
async def health(ring: TheRing, response: Response) -> Health:
    """Workers, models and queues, read from Redis."""
    workers: list[WorkerHealth] = []
    models: dict[str, ModelHealth] = {}
    for name in await ring.registry.live_models():
        for worker in await ring.registry.workers(name):
            workers.append(WorkerHealth.model_validate(worker, from_attributes=True))
        depth = await ring.queue(name).depth()
        models[name] = ModelHealth(
            waiting={kind: queue.waiting for kind, queue in depth.items()},
            leased={kind: queue.leased for kind, queue in depth.items()},
            oldest_ms=max((queue.oldest_ms for queue in depth.values()), default=0),
        )
    ready = any(worker.state == "ready" for worker in workers)
    status = _status(ring, ready, max((model.waiting.get("interactive", 0) for model in models.values()), default=0))
    if status in ("overloaded", "shutting_down"):
        response.status_code = 503
    return Health(
        status=status,
        model_loaded=ready,
        queue_depth=sum(sum(model.waiting.values()) for model in models.values()),
        workers=workers,
        models=models,
        api=ring.api_id,
    )


def _status(ring: Ring, ready: bool, waiting: int) -> Status:
    if ring.shutting_down:
        return "shutting_down"
    load = waiting / ring.settings.max_queue_size
    if load >= 1:
        return "overloaded"
    return "ok" if ready and load < DEGRADED_FROM else "degraded"


@router.get("/livez", summary="Is this process alive?")
async def livez() -> dict[str, str]:
    """Always, while it answers."""
    return {"status": "ok"}


@router.get(
    "/readyz",
    summary="Can a request be answered?",
    responses={503: {"description": "No Redis, no ready worker, or shutting down"}},
)
async def readyz(ring: TheRing, response: Response) -> dict[str, str]:
    """Redis answers and a worker is ready."""
    reason = await _why_not_ready(ring)
    if reason:
        response.status_code = 503
        return {"status": "not ready", "reason": reason}
    return {"status": "ok"}


async def _why_not_ready(ring: Ring) -> str:
    if ring.shutting_down:
        return "shutting down"
    try:
        for name in await ring.registry.live_models():
            if any(worker.state == "ready" for worker in await ring.registry.workers(name)):
                return ""
    except (RedisError, OSError) as error:
        return f"Redis: {error}"
    return "no ready worker"
