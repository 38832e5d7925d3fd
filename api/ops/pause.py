"""POST /pause, POST /resume, GET /is_paused: stop the workers around a change of weights, as vLLM does.

A route answers when every live worker has stopped, or runs again. Meanwhile new requests wait, or are refused
(`--pause-new-requests`); jobs and batches wait in any case.
"""

import asyncio
import time
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel

from api.http.errors import error_responses
from api.ring.ring import Ring, ring_of
from shared.errors import ConflictError, ServiceUnavailableError
from shared.redis.processes.pause import PauseMode, PauseOrder, PauseSwitch

router = APIRouter(tags=["rl"])
TheRing = Annotated[Ring, Depends(ring_of)]

LOOK_S = 0.02
PATIENCE_S = 30.0  # for workers that have nothing to wait for


class Paused(BaseModel):
    """Answer of POST /pause and POST /resume, as vLLM has it."""

    status: Literal["paused", "resumed"]


class IsPaused(BaseModel):
    """vLLM's answer, and the mode."""

    is_paused: bool
    mode: PauseMode | None = None


@router.post("/pause", summary="Stop the workers (vLLM)", responses=error_responses(400, 409, 503))
async def pause(
    ring: TheRing,
    mode: Annotated[
        PauseMode, Query(description="abort: rows end with finish_reason abort; wait: they finish; keep: they freeze")
    ] = "abort",
    clear_cache: Annotated[bool, Query(description="use no KV from before the pause after it")] = True,
    wait_for_inflight_requests: Annotated[bool, Query(description="vLLM's older name of mode=wait")] = False,
) -> Paused:
    """All workers of the ring, those that start later too, until /resume."""
    chosen: PauseMode = "wait" if wait_for_inflight_requests else mode
    switch = PauseSwitch(ring.redis)
    order = await switch.set(chosen, clear_cache=clear_cache)
    await _all_follow(switch, order, ring.settings.request_timeout_s if chosen == "wait" else PATIENCE_S)
    return Paused(status="paused")


@router.post("/resume", summary="Let the workers go on (vLLM)", responses=error_responses(409, 503))
async def resume(ring: TheRing) -> Paused:
    """Frozen rows continue after their last token; waiting sequences are claimed. Without a pause, nothing happens."""
    switch = PauseSwitch(ring.redis)
    await switch.clear()
    await _all_follow(switch, None, PATIENCE_S)
    return Paused(status="resumed")


@router.get("/is_paused", summary="Is a pause in force? (vLLM)")
async def is_paused(ring: TheRing) -> IsPaused:
    """True after POST /pause, until POST /resume."""
    order = await PauseSwitch(ring.redis).current()
    return IsPaused(is_paused=order is not None, mode=None if order is None else order.mode)


async def _all_follow(switch: PauseSwitch, order: PauseOrder | None, patience_s: float) -> None:
    """Wait for every live worker; ConflictError when another order comes meanwhile."""
    until = time.monotonic() + patience_s
    while restless := await switch.restless(order):
        if await switch.current() != order:
            raise ConflictError("another pause or resume has come in between")
        if time.monotonic() > until:
            what = "the resume" if order is None else f"the pause ({order.mode})"
            raise ServiceUnavailableError(f"{what} is in force, but these workers have not followed: {restless}")
        await asyncio.sleep(LOOK_S)
