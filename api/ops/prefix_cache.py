"""POST /reset_prefix_cache: every worker forgets the KV of earlier prompts, as vLLM's engine does.

The order goes to each live worker's control channel, again every second until the worker has answered; to forget twice
is harmless. The route answers when all workers have, so a request that is sent afterwards computes its whole prompt.
"""

import asyncio
import time
import uuid
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from api.http.errors import error_responses
from api.ring.ring import Ring, ring_of
from shared.errors import ServiceUnavailableError
from shared.redis import keys

router = APIRouter(tags=["rl"])

PATIENCE_S = 30.0
REPEAT_S = 1.0
LOOK_S = 0.02
_DEAF = frozenset({"starting", "stuck"})  # states of workers that have no cache yet, or never answer


class CacheReset(BaseModel):
    """Names the workers that have dropped their prefix cache."""

    status: str = "reset"
    workers: list[str] = Field(description="who has forgotten")


@router.post("/reset_prefix_cache", summary="Forget cached prefixes (vLLM)", responses=error_responses(400, 503))
async def reset_prefix_cache(
    ring: Annotated[Ring, Depends(ring_of)],
    reset_running_requests: Annotated[
        bool, Query(description="rows that run compute their KV anew as well, and continue after their last token")
    ] = False,
    reset_external: Annotated[bool, Query(description="vLLM's; there is no cache outside the workers")] = False,
) -> CacheReset:
    """All workers of the ring; one that starts later has nothing to forget."""
    order = f"cache-{uuid.uuid4().hex}"
    message = msgspec.msgpack.encode(("reset-cache", order, "rows" if reset_running_requests else ""))
    until, sent_at = time.monotonic() + PATIENCE_S, float("-inf")
    while True:
        workers = await _hearing(ring)
        answers = await ring.redis.mget([keys.answer(f"{order}-{worker}") for worker in workers]) if workers else []
        left = [worker for worker, answer in zip(workers, answers, strict=True) if answer is None]
        if not left:
            return CacheReset(workers=workers)
        now = time.monotonic()
        if now > until:
            raise ServiceUnavailableError(f"these workers have not said that they have reset their cache: {left}")
        if now - sent_at > REPEAT_S:
            sent_at = now
            for worker in left:
                await ring.redis.publish(keys.control_channel(worker), message)
        await asyncio.sleep(LOOK_S)


async def _hearing(ring: Ring) -> list[str]:
    """Ids of the live workers that can be notified, of all models."""
    live = [worker for model in await ring.registry.names() for worker in await ring.registry.workers(model)]
    return [worker.id for worker in live if worker.state not in _DEAF]
