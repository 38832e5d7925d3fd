"""/v1/jobs: submit, poll, fetch results, cancel, delete. The job runner does the work; jobs only enter here."""

import math
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Header, Query, Request
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.responses import Response, StreamingResponse

from api.callers.caller import asker, key_name, may_record
from api.callers.fair_pool import aside
from api.generation.collection import check_scoring
from api.generation.target import JobTarget, find_job_target
from api.http.bodies import LONG_BYTES, BodyRoute
from api.http.errors import error_responses, from_validation, json_reply
from api.http.limits import check_shape, is_multipart
from api.jobs.body import JobBody, upload_inputs
from api.jobs.images import JobPictures, Taking
from api.ring.choosing import from_each
from api.ring.ring import Ring, ring_of
from api.webhooks.body import webhook_of
from shared.adapters import AdapterRef
from shared.errors import InvalidRequestError, UnsupportedParameterError
from shared.jobs import TERMINAL, JobSpec, JobStatus
from shared.redis.jobs.ledger import unknown_job
from shared.redis.jobs.store import new_job_id
from shared.rewards.kinds import check

router = APIRouter(tags=["jobs"], route_class=BodyRoute)
TheRing = Annotated[Ring, Depends(ring_of)]

PAGE = 500
MAX_LISTED = 1000
_SPEC_BYTES = 1 << 20
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": JobBody.model_json_schema()},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["spec", "file"],
                    "properties": {
                        "spec": {"type": "string", "description": "JSON: the body without prompts"},
                        "file": {
                            "type": "string",
                            "format": "binary",
                            "description": "JSONL, one prompt a line: a string, or an object with one of `prompt`, "
                            "`messages`, `prompt_ids`, and `reference`, `completion`, `metadata`",
                        },
                    },
                }
            },
        },
    }
}
_STATUS_SCHEMA: dict[str, Any] = {"content": {"application/json": {"schema": msgspec.json.schema(JobStatus)}}}


@router.post(
    "/v1/jobs",
    status_code=202,
    summary="Submit a job",
    openapi_extra=_BODY,
    response_class=Response,
    responses={202: {"description": "The job's status", **_STATUS_SCHEMA}, **error_responses(400, 404, 409, 413, 503)},
)
async def submit_job(
    request: Request,
    ring: TheRing,
    idempotency_key: Annotated[str, Header(description="the same as the body's idempotency_key")] = "",
) -> Response:
    """A durable job of any number of prompts; poll it by its id. JSON, or a multipart upload of JSONL."""
    if is_multipart(request.headers):
        return await _submit_upload(request, ring, idempotency_key)
    data = await request.body()
    body = await aside(_parsed, data) if len(data) > LONG_BYTES else _parsed(data)
    if body.prompts is None:
        raise InvalidRequestError("'prompts' is required (or upload JSONL as multipart/form-data)", param="prompts")
    target = await _target(ring, body)
    ring = target.ring
    spec = await _checked_spec(ring, body, target)
    inputs = body.inputs(target.card, _taking(ring, spec, target))
    job_id, _ = await ring.jobs.create(spec, inputs, body.idempotency_key or idempotency_key)
    return await _accepted(ring, job_id)


async def _submit_upload(request: Request, ring: Ring, idempotency_key: str) -> Response:
    async with request.form(max_files=1, max_fields=1, max_part_size=_SPEC_BYTES) as form:
        spec_field, file = form.get("spec"), form.get("file")
        if not isinstance(spec_field, str):
            raise InvalidRequestError("the form field 'spec' (JSON) is required", param="spec")
        if not isinstance(file, UploadFile):
            raise InvalidRequestError("the form field 'file' (JSONL) is required, as a file", param="file")
        body = await aside(_parsed_field, spec_field.encode(), ring.settings.max_json_values)
        if body.prompts is not None:
            raise InvalidRequestError("'prompts' and a file exclude each other", param="prompts")
        target = await _target(ring, body)
        ring = target.ring
        spec = await _checked_spec(ring, body, target)
        inputs = upload_inputs(file, target.card, body.kind, _taking(ring, spec, target))
        job_id, _ = await ring.jobs.create(spec, inputs, body.idempotency_key or idempotency_key)
    return await _accepted(ring, job_id)


def _parsed(data: bytes) -> JobBody:
    try:
        return JobBody.model_validate_json(data)
    except ValidationError as error:
        raise from_validation(error.errors()) from error


def _parsed_field(data: bytes, max_values: int) -> JobBody:
    check_shape(data, max_values)
    return _parsed(data)


async def _target(ring: Ring, body: JobBody) -> JobTarget:
    """Jobs are durable: the model must be known, but no worker needs to live right now."""
    return await find_job_target(ring, body.model, body.adapter or body.lora_adapter, body.adapter_policy)


async def _checked_spec(ring: Ring, body: JobBody, target: JobTarget) -> JobSpec:
    spec = body.spec(target.card, target.adapter, ring.settings.logprobs_mode)
    record_s = ring.settings.record_ttl_s if may_record() else 0
    spec = msgspec.structs.replace(spec, id=new_job_id(), tenant=asker().tenant, record_s=record_s)
    if spec.reward is not None:
        await check_scoring(ring, check(spec.reward), "reward.options")
    if body.webhook is not None and ring.home is not ring:
        raise UnsupportedParameterError(f"'webhook': the job's model is in ring '{ring.name}'", param="webhook")
    return msgspec.structs.replace(spec, key=key_name(), webhook=webhook_of(ring, body.webhook))


def _taking(ring: Ring, spec: JobSpec, target: JobTarget) -> Taking:
    images = ring.jobs.images(spec.id, ring.settings.max_upload_bytes)
    return JobPictures(ring, target.card, spec.kind, images).taken


async def _accepted(ring: Ring, job_id: str) -> Response:
    status = await ring.jobs.status(job_id)
    return json_reply(status, 202, {"Location": f"/v1/jobs/{job_id}"})


@router.get("/v1/jobs", summary="List jobs", response_class=Response)
async def list_jobs(
    ring: TheRing,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
    before: Annotated[str, Query(description="the id after which to go on, from the last page")] = "",
) -> Response:
    """Jobs, newest first; of all rings that answer."""
    jobs = await (_of_all_rings(ring, limit, before) if ring.others else ring.jobs.list(limit, before, asker()))
    return json_reply({"object": "list", "data": jobs, "has_more": len(jobs) == limit})


async def _of_all_rings(ring: Ring, limit: int, before: str) -> list[JobStatus]:
    who, below = asker(), math.inf
    if before:
        places = await from_each(ring, lambda each: each.jobs.listed_at(before, who))
        if not places:
            raise unknown_job(before)
        below = places[0][1] or 0.0
    pages = await from_each(ring, lambda each: each.jobs.listed_before(below, limit, who))
    listed = sorted((entry for _, page in pages for entry in page), key=lambda entry: -entry[0])
    return [status for _, status in listed[:limit]]


@router.get(
    "/v1/jobs/{job_id}",
    summary="Poll a job",
    response_class=Response,
    responses={200: {"description": "The job's status", **_STATUS_SCHEMA}, **error_responses(404)},
)
async def poll_job(job_id: str, ring: TheRing) -> Response:
    """State, counts, progress, usage, mean reward."""
    return json_reply(await ring.jobs.status(job_id))


@router.get(
    "/v1/jobs/{job_id}/results",
    summary="Fetch results",
    response_class=Response,
    responses={
        200: {
            "description": "Trajectories as JSON lines, by prompt and sample. Header `x-next-after` is the `after` "
            "with which to go on.",
            "content": {"application/x-ndjson": {}},
        },
        **error_responses(404),
    },
)
async def job_results(
    job_id: str,
    ring: TheRing,
    after: Annotated[int, Query(ge=-1, description="ordinal (prompt * n + sample) after which to begin")] = -1,
    limit: Annotated[int | None, Query(ge=1, le=10_000, description="most lines; without it all there are")] = None,
    complete_only: Annotated[
        bool, Query(description="stop before the first unfinished sample, so that a follower skips none")
    ] = False,
) -> Response:
    """Finished samples, also while the job runs."""
    status = await ring.jobs.status(job_id)
    if limit is not None:
        lines = await ring.jobs.results(job_id, after, limit, complete_only=complete_only)
        body = b"".join(line + b"\n" for _, line in lines)
        following = lines[-1][0] if lines else after
        return Response(body, headers=_next_after(following), media_type="application/x-ndjson")
    end = status.counts.total if status.status in TERMINAL else status.complete_through
    return StreamingResponse(
        _all_results(ring, job_id, after, complete_only),
        headers=_next_after(max(after, end - 1)),
        media_type="application/x-ndjson",
    )


def _next_after(ordinal: int) -> dict[str, str]:
    return {"x-next-after": str(ordinal)}


async def _all_results(ring: Ring, job_id: str, after: int, complete_only: bool) -> AsyncIterator[bytes]:
    while lines := await ring.jobs.results(job_id, after, PAGE, complete_only=complete_only):
        yield b"".join(line + b"\n" for _, line in lines)
        after = lines[-1][0]


@router.post(
    "/v1/jobs/{job_id}/cancel",
    summary="Cancel a job",
    response_class=Response,
    responses={200: {"description": "The job's status", **_STATUS_SCHEMA}, **error_responses(404)},
)
async def cancel_job(job_id: str, ring: TheRing) -> Response:
    """End a job; what has finished stays."""
    return json_reply(await ring.jobs.cancel(job_id))


@router.delete("/v1/jobs/{job_id}", summary="Delete a job", responses=error_responses(404, 409))
async def delete_job(job_id: str, ring: TheRing) -> dict[str, Any]:
    """Forget a job that has ended, with its inputs and results, before its time to live is over."""
    await ring.jobs.delete(job_id)
    return {"id": job_id, "object": "job", "deleted": True}


@router.post(
    "/v1/jobs/{job_id}/retry",
    status_code=202,
    summary="Submit a job again",
    response_class=Response,
    responses={202: {"description": "The new job's status", **_STATUS_SCHEMA}, **error_responses(404)},
)
async def retry_job(job_id: str, ring: TheRing) -> Response:
    """A new job with the same settings and inputs; its metadata says `retry_of`."""
    if asker().limited and (adapter := (await ring.jobs.spec(job_id)).adapter):
        for choice in AdapterRef.parse(adapter).choices:  # a name may have become another tenant's
            await ring.adapters.summary(choice.name)
    return await _accepted(ring, await ring.jobs.submit_again(job_id))
