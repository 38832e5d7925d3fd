"""/v1/batches: a file of requests, answered when there is room; a file of answers comes back."""

import time
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query
from pydantic import Field
from starlette.responses import Response

from api.errors import error_responses
from api.openai.batch_lines import Endpoint
from api.openai.fields import RequestModel
from api.openai.files import MAX_TTL_S, MIN_TTL_S, TTL_S, page
from api.ring import Ring, ring_of
from shared.errors import ConflictError, UnknownJobError
from shared.jobs import TERMINAL, JobStatus
from shared.redis.batch_store import ENDED, BatchRecord, BatchSpec, new_batch_id
from shared.redis.file_store import new_file_id

router = APIRouter(tags=["openai"])
TheRing = Annotated[Ring, Depends(ring_of)]

_UNITS = {"m": 60, "h": 3_600, "d": 86_400}
MAX_WINDOW_S = 7 * 86_400
_OK: dict[int | str, dict[str, Any]] = {200: {"description": "The batch object"}}


class ExpiresAfter(RequestModel):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_TTL_S, le=MAX_TTL_S)


class BatchBody(RequestModel):
    """POST /v1/batches."""

    input_file_id: str = Field(max_length=256)
    endpoint: Endpoint
    completion_window: str = Field(
        pattern=r"^[1-9][0-9]{0,3}[mhd]$", description="24h, or any time of minutes, hours or days up to 7d"
    )
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(default=None, max_length=16)
    output_expires_after: ExpiresAfter | None = None


@router.post(
    "/v1/batches",
    summary="Create a batch",
    response_class=Response,
    responses={**_OK, **error_responses(400, 404, 503)},
)
async def create_batch(body: BatchBody, ring: TheRing) -> Response:
    """Answers at once; its lines are checked next."""
    file = await ring.files.find(body.input_file_id)
    now = int(time.time())
    window_s = min(MAX_WINDOW_S, int(body.completion_window[:-1]) * _UNITS[body.completion_window[-1]])
    spec = BatchSpec(
        id=new_batch_id(),
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + window_s,
        output_file_id=new_file_id(),
        error_file_id=new_file_id(),
        output_ttl_s=body.output_expires_after.seconds if body.output_expires_after else TTL_S,
        metadata=body.metadata or {},
    )
    await ring.batches.create(spec)
    return await _shown(ring, await ring.batches.find(spec.id))


@router.get("/v1/batches", summary="List batches", response_class=Response, responses={**error_responses(400, 404)})
async def list_batches(
    ring: TheRing,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str, Query(description="the id after which to go on")] = "",
) -> Response:
    """Batches, newest first."""
    found, more = await ring.batches.page(limit, after)
    return _json(page([batch_object(record, await _job(ring, record)) for record in found], more))


@router.get(
    "/v1/batches/{batch_id}",
    summary="Poll a batch",
    response_class=Response,
    responses={**_OK, **error_responses(404)},
)
async def retrieve_batch(batch_id: str, ring: TheRing) -> Response:
    """Its state, counts and files."""
    return await _shown(ring, await ring.batches.find(batch_id))


@router.post(
    "/v1/batches/{batch_id}/cancel",
    summary="Cancel a batch",
    response_class=Response,
    responses={**_OK, **error_responses(404, 409)},
)
async def cancel_batch(batch_id: str, ring: TheRing) -> Response:
    """End it; what has been answered stays, and is in the output file."""
    record = await ring.batches.find(batch_id)
    if record.cancelling_at == 0:
        if not await ring.batches.change(batch_id, cancelling_at=int(time.time())):
            raise ConflictError(f"batch {batch_id} has ended: it is {(await ring.batches.find(batch_id)).state}")
        record = await ring.batches.find(batch_id)
        if record.job:
            await ring.jobs.cancel(record.job)
    elif record.state in ENDED:
        raise ConflictError(f"batch {batch_id} has ended: it is {record.state}")
    return await _shown(ring, record)


async def _job(ring: Ring, record: BatchRecord) -> JobStatus | None:
    try:
        return await ring.jobs.status(record.job) if record.job else None
    except UnknownJobError:
        return None


async def _shown(ring: Ring, record: BatchRecord) -> Response:
    return _json(batch_object(record, await _job(ring, record)))


def batch_object(record: BatchRecord, job: JobStatus | None) -> dict[str, Any]:
    """OpenAI's batch object."""
    spec, status = record.spec, status_of(record, job)
    errors = [msgspec.to_builtins(error) for error in record.errors]
    usage = job.usage if job is not None else None
    ended = {f"{state}_at": record.ended_at if status == state else None for state in sorted(ENDED)}
    return {
        "id": spec.id,
        "object": "batch",
        "endpoint": spec.endpoint,
        "model": record.model or None,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": spec.input_file_id,
        "completion_window": spec.completion_window,
        "status": status,
        "output_file_id": spec.output_file_id if record.has_output else None,
        "error_file_id": spec.error_file_id if record.has_errors else None,
        "created_at": spec.created_at,
        "in_progress_at": record.in_progress_at or None,
        "expires_at": spec.expires_at,
        "finalizing_at": record.finalizing_at or None,
        **ended,
        "cancelling_at": record.cancelling_at or None,
        "request_counts": request_counts(record, job),
        "usage": {
            "input_tokens": usage.prompt_tokens if usage else 0,
            "output_tokens": usage.completion_tokens if usage else 0,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens if usage else 0,
        },
        "metadata": spec.metadata or None,
    }


def request_counts(record: BatchRecord, job: JobStatus | None) -> dict[str, int]:
    """Lines; while the job runs, its sequences scaled to lines (the same where a line has one choice)."""
    completed, failed = record.completed, record.failed
    if record.state not in ENDED and job is not None and job.counts.total:
        completed = job.counts.succeeded * record.lines // job.counts.total
        failed = job.counts.failed * record.lines // job.counts.total
    return {"total": record.lines, "completed": completed, "failed": failed}


def status_of(record: BatchRecord, job: JobStatus | None) -> str:
    """OpenAI's state, from what is stored and how far the job is."""
    if record.state in ENDED:
        return record.state
    if record.cancelling_at:
        return "cancelling"
    if job is not None and job.status in TERMINAL:
        return "finalizing"
    return record.state


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
