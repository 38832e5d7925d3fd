"""POST /abort_requests: end requests by the name that they gave themselves, or by the id of their answers (vLLM).

A request that says `request_id` leaves a note in Redis while it runs, so that any api process finds its sequences. A
name belongs to an API key: none can be aborted by guessing. The id of an answer is random, and finds its sequences
by itself.
"""

import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.callers.caller import asker
from api.generation.running import owner
from api.http.bodies import BodyRoute
from api.http.errors import error_responses
from api.http.fields import RequestModel
from api.ring.choosing import from_each
from api.ring.ring import Ring, TheRing
from shared.redis import keys
from shared.redis.queue.named_requests import NamedRequests
from shared.sequences import decode_spec

router = APIRouter(tags=["openai"], route_class=BodyRoute)

_ANSWER = re.compile(r"(cmpl|chatcmpl|embd|score|predict|act)-[0-9a-f]{32}")
_SHOWN = re.compile(r"(?:chatcmpl-|cmpl-|resp_)(.+)")
AT_ONCE = 64  # sequences that are looked for in one round trip


class AbortBody(RequestModel):
    """Request body of POST /abort_requests, and of vLLM's newer name for it, /inference/v1/abort_requests."""

    request_ids: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(min_length=1, max_length=256)


class Aborted(BaseModel):
    """Result of the cancellation for each name."""

    aborted: list[str]
    unknown: list[str] = Field(description="not under way: never there, or ended")


@router.post("/inference/v1/abort_requests", summary="Abort requests (vLLM)", responses=error_responses(400, 503))
@router.post("/abort_requests", summary="Abort requests (vLLM)", responses=error_responses(400, 503))
async def abort_requests(body: AbortBody, ring: TheRing) -> Aborted:
    """Their clients get an error of type `cancelled` (499); in a stream it is the last event."""
    found = Aborted(aborted=[], unknown=[])
    for name in dict.fromkeys(body.request_ids):
        ended = sum(count for _, count in await from_each(ring, partial(_abort, name=name)))
        (found.aborted if ended else found.unknown).append(name)
    return found


async def _abort(ring: Ring, name: str) -> int:
    return sum([await _cancel(ring, model, request) async for model, request in _requests(ring, name)])


async def _requests(ring: Ring, name: str) -> AsyncIterator[tuple[str, str]]:
    """(model, id) of the requests that go by a name."""
    shown = _SHOWN.fullmatch(name)
    for each in (name, *(shown.groups() if shown else ())):
        for found in await NamedRequests(ring.redis).find(owner(), each):
            yield found
    request = f"chatcmpl-{name.removeprefix('resp_')}" if name.startswith("resp_") else name
    if _ANSWER.fullmatch(request):
        for model in await ring.registry.names():
            yield model, request


async def _cancel(ring: Ring, model: str, request: str) -> int:
    """End the sequences of a request; how many there were to end."""
    ended = start = 0
    while True:
        names = [f"{request}-{number}" for number in range(start, start + AT_ONCE)]
        async with ring.redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hget(keys.sequence(model, name), "spec")
            specs = zip(names, await pipe.execute(), strict=True)
        there = [name for name, spec in specs if spec is not None and asker().owns(decode_spec(spec).tenant)]
        answers = await ring.queue(model).cancel(there) if there else {}
        ended += sum(bool(answer) for answer in answers.values())
        if len(there) < AT_ONCE:
            return ended
        start += AT_ONCE
