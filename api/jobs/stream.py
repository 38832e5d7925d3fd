"""GET /v1/jobs/{id}/stream: a job's trajectories as they finish, for clients that watch.

Samples come in the order in which they were recorded, which stands in Redis. So an event's id is a place in it, and a
client that was cut off continues after any id, on any api process: `EventSource` of browsers does so by itself.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header
from starlette.responses import Response

from api.http.errors import error_object, error_responses
from api.http.sse import SHUTTING_DOWN, EventStream
from api.ring.ring import Ring, TheRing
from shared.errors import InvalidRequestError, UnknownJobError
from shared.jobs import TERMINAL

router = APIRouter(tags=["jobs"])

PAGE = 64  # trajectories, before others' tokens go in between
LOOK_S, LONGEST_LOOK_S = 0.1, 1.0  # between two looks: longer and longer while nothing finishes
SILENCE_S = 15.0  # before a line that says nothing, so that no proxy takes the connection for dead
_PLACE = re.compile(r"[0-9]{1,9}")

_END = b"event: error\ndata: %s\n\n" % error_object(SHUTTING_DOWN)


@router.get(
    "/v1/jobs/{job_id}/stream",
    summary="Watch a job",
    response_class=Response,
    responses=error_responses(
        400, 404, ok="`trajectory` events as samples finish, a `status` event when the job ends, both JSON"
    ),
)
async def stream_job(
    job_id: str,
    ring: TheRing,
    last_event_id: Annotated[str, Header(description="id of the last event that was read; empty: from the start")] = "",
) -> Response:
    """Trajectories as `/results` has them, in the order in which they finish."""
    if last_event_id and not _PLACE.fullmatch(last_event_id):
        raise InvalidRequestError(f"malformed Last-Event-ID '{last_event_id[:100]}'", param="Last-Event-ID")
    await ring.jobs.status(job_id)
    start = int(last_event_id) + 1 if last_event_id else 0
    return EventStream(_events(ring, job_id, start), _END)


async def _events(ring: Ring, job_id: str, start: int) -> AsyncGenerator[bytes, None]:
    spoke, pause_s = time.monotonic(), LOOK_S
    while not ring.shutting_down:
        state, found = await ring.jobs.recorded(job_id, start, PAGE)
        if found:
            start, spoke, pause_s = found[-1][0] + 1, time.monotonic(), LOOK_S
            yield b"".join(b"id: %d\nevent: trajectory\ndata: %s\n\n" % each for each in found)
            continue
        if not state or state in TERMINAL:
            yield await _last(ring, job_id)
            return
        if time.monotonic() - spoke > SILENCE_S:
            spoke = time.monotonic()
            yield b": the job goes on\n\n"
        await asyncio.sleep(pause_s)
        pause_s = min(LONGEST_LOOK_S, 1.5 * pause_s)
    yield _END


async def _last(ring: Ring, job_id: str) -> bytes:
    try:
        return b"event: status\ndata: %s\n\n" % msgspec.json.encode(await ring.jobs.status(job_id))
    except UnknownJobError as error:  # deleted meanwhile
        return b"event: error\ndata: %s\n\n" % error_object(error)
