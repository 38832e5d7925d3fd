"""/v1/batches: a file of requests, answered when there is room; a file of answers comes back."""

import contextlib
import time
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Header, Query
from pydantic import Field
from starlette.responses import Response

from api.batches.file_routes import MAX_TTL_S, MIN_TTL_S, TTL_S, page
from api.batches.lines import Endpoint
from api.callers.caller import asker, key_name, may_cache
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.http.fields import RequestModel
from api.ring.choosing import ring_keeping
from api.ring.ring import Ring, ring_of
from api.tenants import check
from api.webhooks.body import WebhookBody, webhook_of
from shared.errors import (
    ConflictError,
    InvalidRequestError,
    ServiceUnavailableError,
    UnknownBatchError,
    UnknownJobError,
)
from shared.jobs import TERMINAL, JobStatus
from shared.redis.files.batch_store import ENDED, PREFIX, BatchRecord, BatchSpec, new_batch_id
from shared.redis.files.file_store import new_file_id

router = APIRouter(tags=["openai"], route_class=BodyRoute)
TheRing = Annotated[Ring, Depends(ring_of)]

_UNITS = {"m": 60, "h": 3_600, "d": 86_400}
MAX_WINDOW_S = 7 * 86_400
_OK: dict[int | str, dict[str, Any]] = {200: {"description": "The batch object"}}


Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]
IdempotencyKey = Annotated[str, Header(max_length=256, description="the same key gives the same batch")]


class ExpiresAfter(RequestModel):
    """Time after which a file is deleted."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_TTL_S, le=MAX_TTL_S)


class BatchBody(RequestModel):
    """Request body of POST /v1/batches."""

    input_file_id: str = Field(max_length=256)
    endpoint: Endpoint
    completion_window: str = Field(
        pattern=r"^[1-9][0-9]{0,3}[mhd]$", description="24h, or any time of minutes, hours or days up to 7d"
    )
    metadata: Metadata | None = Field(default=None, max_length=16)
    output_expires_after: ExpiresAfter | None = None
    webhook: WebhookBody | None = Field(default=None, description="the URL that is notified of its end")


@router.post(
    "/v1/batches",
    summary="Create a batch",
    response_class=Response,
    responses={**_OK, **error_responses(400, 404, 409, 503)},
)
async def create_batch(body: BatchBody, ring: TheRing, idempotency_key: IdempotencyKey = "") -> Response:
    """Answers at once; its lines are checked next."""
    now = int(time.time())
    window_s = int(body.completion_window[:-1]) * _UNITS[body.completion_window[-1]]
    if window_s > MAX_WINDOW_S:
        raise InvalidRequestError("'completion_window' is at most 7d", param="completion_window")
    tenant = asker().tenant
    spec = BatchSpec(
        id=new_batch_id(idempotency_key, tenant),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + window_s,
        output_file_id=new_file_id(),
        error_file_id=new_file_id(),
        output_ttl_s=body.output_expires_after.seconds if body.output_expires_after else TTL_S,
        metadata=body.metadata or {},
        tenant=tenant,
        key=key_name(),
        webhook=webhook_of(ring, body.webhook),
        rings=tuple(each.name for each in ring.home.others),
        cache=may_cache(),
    )
    with contextlib.suppress(UnknownBatchError):
        found = _same(await ring.batches.find(spec.id), spec)
        await ring.batches.keep_listed(found)
        return await _shown(ring, found)
    await check(ring, "file", body.input_file_id)
    file = await ring.files.find(body.input_file_id)
    if file.purpose != "batch":
        raise InvalidRequestError(f"{file.id} has the purpose '{file.purpose}', not 'batch'", param="input_file_id")
    await ring.batches.create(spec)
    return await _shown(ring, _same(await ring.batches.find(spec.id), spec))


def _same(found: BatchRecord, asked: BatchSpec) -> BatchRecord:
    """The batch under an idempotency key, when it is the one that is asked for again."""
    for name in ("endpoint", "input_file_id", "completion_window", "output_ttl_s", "metadata"):
        if getattr(found.spec, name) != getattr(asked, name):
            raise ConflictError(f"this idempotency key belongs to another batch, {asked.id}: its {name} differs")
    return found


@router.get("/v1/batches", summary="List batches", response_class=Response, responses={**error_responses(400, 404)})
async def list_batches(
    ring: TheRing,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str, Query(description="the id after which to go on")] = "",
) -> Response:
    """Returns batches, the newest ones first."""
    found, more = await ring.batches.page(limit, after, asker(), prefix=PREFIX)
    return json_reply(page([batch_object(record, await job_of(ring, record)) for record in found], more))


@router.get(
    "/v1/batches/{batch_id}",
    summary="Poll a batch",
    response_class=Response,
    responses={**_OK, **error_responses(404)},
)
async def retrieve_batch(batch_id: str, ring: TheRing) -> Response:
    """Returns the batch with its state, counts and files."""
    return await _shown(ring, await ring.batches.find(batch_id, PREFIX))


@router.post(
    "/v1/batches/{batch_id}/cancel",
    summary="Cancel a batch",
    response_class=Response,
    responses={**_OK, **error_responses(404, 409)},
)
async def cancel_batch(batch_id: str, ring: TheRing) -> Response:
    """End it; what has been answered stays, and is in the output file."""
    return await _shown(ring, await cancel(ring, batch_id, PREFIX))


async def cancel(ring: Ring, batch_id: str, prefix: str = "") -> BatchRecord:
    """Ask a batch to end, once or several times; ConflictError when it has ended. `prefix`: of its protocol's ids."""
    record = await ring.batches.find(batch_id, prefix)
    if record.cancelling_at == 0:
        first = await ring.batches.change(batch_id, cancelling_at=int(time.time()))
        record = await ring.batches.find(batch_id)
        if first and record.job:
            with contextlib.suppress(UnknownJobError, ServiceUnavailableError):  # a process of its ring cancels it
                await ring_keeping(ring, record.ring).jobs.cancel(record.job)
        if first:
            return record
    if record.state in ENDED:
        raise ConflictError(f"batch {batch_id} has ended: it is {record.state}")
    return record


async def job_of(ring: Ring, record: BatchRecord) -> JobStatus | None:
    """The job of a batch; None when it has none yet, its time to live is over, or its ring is away."""
    if not record.job:
        return None
    try:
        there = ring_keeping(ring, record.ring)
        return await there.jobs.status(record.job)
    except (UnknownJobError, ServiceUnavailableError, InvalidRequestError):
        return None


async def _shown(ring: Ring, record: BatchRecord) -> Response:
    return json_reply(batch_object(record, await job_of(ring, record)))


def batch_object(record: BatchRecord, job: JobStatus | None) -> dict[str, Any]:
    """The batch as OpenAI's batch object."""
    spec, status = record.spec, status_of(record, job)
    errors = [msgspec.to_builtins(error) for error in record.errors]
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
        "usage": _usage(record),
        "metadata": spec.metadata or None,
    }


def _usage(record: BatchRecord) -> dict[str, Any] | None:
    """OpenAI's usage, of the answered lines; None before the batch has ended."""
    if record.state not in ENDED:
        return None
    return {
        "input_tokens": record.input_tokens,
        "input_tokens_details": {"cached_tokens": record.cached_tokens},
        "output_tokens": record.output_tokens,
        "output_tokens_details": {"reasoning_tokens": record.reasoning_tokens},
        "total_tokens": record.input_tokens + record.output_tokens,
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
