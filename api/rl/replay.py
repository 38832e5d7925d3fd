"""POST /v1/replay: compute what was generated once more, and say of each token whether it is what the model says."""

from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from api.callers.caller import asker, while_wanted
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.http.fields import RequestModel
from api.ring.ring import Ring, TheRing
from shared.errors import InvalidRequestError
from shared.redis.queue.replayer import Replayer, replay_calls
from shared.redis.recordings import Recording, find_recordings, unknown_recording
from shared.replay import bound_of
from shared.replay_report import ReplayReport

router = APIRouter(tags=["training"], route_class=BodyRoute)


class ReplayBody(RequestModel):
    """The completion to replay, the worker that does it, and the bound of a tie."""

    id: str = Field(min_length=1, max_length=512, description="of a completion, of a sequence, or of a job's sample")
    worker: str = Field(default="", description='the worker that computes it again; "": any')
    bound: float | None = Field(
        default=None, ge=0, le=1, description="difference of probability that counts as a tie; default: by the dtype"
    )


@router.post(
    "/v1/replay",
    summary="Replay a completion",
    response_class=Response,
    responses=error_responses(400, 404, 429, 503, ok="A report for each choice"),
)
async def replay(body: ReplayBody, ring: TheRing) -> Response:
    """A report for each choice: how many tokens are the same, ties or wrong, and each one that differs."""
    await ring.live_models()
    who = asker()
    recordings = await find_recordings(ring.redis, list(ring.models_seen), body.id)
    found = [each for each in recordings if not who.limited or who.owns(each.spec.tenant)]
    if not found:
        raise unknown_recording(body.id)
    reports = await while_wanted(_replayed(ring, found, body))
    return json_reply({"object": "list", "data": [_shown(report) for report in reports]})


async def _replayed(ring: Ring, found: list[Recording], body: ReplayBody) -> list[ReplayReport]:
    served = await ring.served(found[0].spec.model)
    card = served.card
    if body.worker and body.worker not in (worker.id for worker in ring.serving(card.name)):
        raise InvalidRequestError(f"no worker {body.worker[:80]!r} serves model '{card.name}' now", param="worker")
    bound = bound_of(card.dtype) if body.bound is None else body.bound
    async with replay_calls(ring.redis, card.name) as calls:
        replayer = Replayer(calls, card)
        return [await replayer.replay(each, bound, on=body.worker) for each in found]


def _shown(report: ReplayReport) -> dict[str, Any]:
    return {"object": "replay", "verdict": report.verdict, **msgspec.to_builtins(report)}
