"""GET /v1/streams/{id}: go on with a stream whose connection, or whose api process, is gone."""

from typing import Annotated

from fastapi import APIRouter, Depends, Header
from starlette.responses import Response

from api.errors import error_responses
from api.generation import Generation
from api.openai.choices import Choice
from api.openai.chunks import seen_until
from api.openai.replies import stream_events
from api.resume import take_over
from api.ring import Ring, ring_of
from api.sse import EventStream
from shared.errors import InvalidRequestError

router = APIRouter(tags=["openai"])


@router.get(
    "/v1/streams/{request_id}",
    summary="Resume a stream",
    response_class=Response,
    responses={200: {"description": "The chunks after `Last-Event-ID`, to [DONE]"}, **error_responses(400, 404, 503)},
)
async def resume_stream(
    request_id: str,
    ring: Annotated[Ring, Depends(ring_of)],
    last_event_id: Annotated[str, Header(description="id of the last event that was read; empty: from the start")] = "",
) -> Response:
    """Only streams that were asked for with `stream_options.include_event_ids` can be resumed."""
    resumable = await take_over(ring, request_id)
    plan = resumable.plan
    try:
        seen = seen_until(last_event_id, plan.choices)
    except ValueError:
        raise InvalidRequestError(f"malformed Last-Event-ID '{last_event_id}'", param="Last-Event-ID") from None
    _, codec = await ring.known(plan.served)
    seqs = [plan.sequence(choice) for choice in range(plan.choices)]
    choices = [Choice(plan, codec, progress) for progress in seen]
    generation = Generation.resume(ring, plan.served, seqs, resumable.history, plan.deadline_ms)
    return EventStream(stream_events(ring, generation, plan, codec, choices))
