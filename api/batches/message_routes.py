"""/v1/messages/batches: Anthropic's Message Batches, which are batches of one file that was not uploaded.

The requests of a body become the lines of a file, and all of their answers one file of results. In between a Message
Batch is a batch like any other: checked, run as a job, and ended once.
"""

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response, StreamingResponse

from api.anthropic.routes import described
from api.batches.batch_routes import IdempotencyKey, cancel
from api.batches.file_routes import TTL_S
from api.batches.lines import too_much
from api.batches.shapes import MESSAGES
from api.batches.work import MAX_LINE_BYTES, MAX_LINES
from api.callers.caller import asker, key_name, may_cache
from api.callers.fair_pool import aside
from api.generation.target import find_job_target
from api.http.bodies import LONG_BYTES, BodyRoute
from api.http.errors import json_reply
from api.http.fields import rfc3339
from api.ring.choosing import ring_keeping
from api.ring.ring import Ring, ring_of
from shared.errors import (
    ConflictError,
    InvalidRequestError,
    PayloadTooLargeError,
    ServiceUnavailableError,
    UnknownBatchError,
    UnknownFileError,
    UnknownJobError,
    UnsupportedParameterError,
)
from shared.redis.files.batch_store import ENDED, BatchRecord, BatchSpec, new_batch_id
from shared.redis.files.file_store import StoredFile, new_file_id
from shared.redis.keys import DAY_S

router = APIRouter(tags=["anthropic"], route_class=BodyRoute)
TheRing = Annotated[Ring, Depends(ring_of)]

PREFIX = "msgbatch_"
WINDOW_S = DAY_S  # Anthropic's
_MAX_PARAMS = MAX_LINE_BYTES - 256  # of one request: the rest of its line is shorter
_FAR_TOO_MANY = 10 * MAX_LINES  # places with the word `custom_id`: some may be in params
_CUSTOM_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_BREAKS = bytes.maketrans(b"\r\n", b"  ")  # between the values of a request, which gets one line
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["requests"],
                    "properties": {
                        "requests": {
                            "type": "array",
                            "minItems": 1,
                            "maxItems": MAX_LINES,
                            "items": {
                                "type": "object",
                                "required": ["custom_id", "params"],
                                "properties": {
                                    "custom_id": {"type": "string", "pattern": f"^{_CUSTOM_ID.pattern}$"},
                                    "params": {"$ref": "#/components/schemas/MessagesRequest"},
                                },
                            },
                        }
                    },
                }
            }
        },
    }
}
_OK = described("The Message Batch")


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    params: msgspec.Raw


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    requests: list[_Asked]


_body_decoder = msgspec.json.Decoder(_Body)
_params_decoder = msgspec.json.Decoder(dict[str, Any])


@router.post(
    "/v1/messages/batches",
    summary="Create a Message Batch (Anthropic)",
    openapi_extra=_BODY,
    response_class=Response,
    responses=_OK,
)
async def create_message_batch(request: Request, ring: TheRing, idempotency_key: IdempotencyKey = "") -> Response:
    """Requests to /v1/messages, answered when there is room; what is wrong with one of them is its own result."""
    raw = await request.body()
    asked, digest = await aside(_read, raw) if len(raw) > LONG_BYTES else _read(raw)
    now, tenant = int(time.time()), asker().tenant
    spec = BatchSpec(
        id=new_batch_id(idempotency_key, tenant, PREFIX),
        endpoint=MESSAGES,
        input_file_id=new_file_id(),
        completion_window="24h",
        created_at=now,
        expires_at=now + WINDOW_S,
        output_file_id=new_file_id(),
        error_file_id=new_file_id(),
        output_ttl_s=TTL_S,
        tenant=tenant,
        key=key_name(),
        digest=digest,
        rings=tuple(each.name for each in ring.home.others),
        cache=may_cache(),
    )
    with contextlib.suppress(UnknownBatchError):
        found = _same(await ring.batches.find(spec.id), digest)
        await ring.batches.keep_listed(found)
        return _shown(found, request)
    await _check(ring, asked)
    await _write(ring, spec, asked)
    try:
        await ring.batches.create(spec, len(asked))
    except Exception:
        with contextlib.suppress(Exception):
            await _stored(ring, spec)
        raise
    return _shown(_same(await _stored(ring, spec), digest), request)


async def _stored(ring: Ring, spec: BatchSpec) -> BatchRecord:
    """The batch under the id of `spec`. Lines that were written for it and are not its lines are deleted."""
    try:
        record = await ring.batches.find(spec.id)
    except UnknownBatchError:
        await ring.files.delete(spec.input_file_id)
        raise
    if record.spec.input_file_id != spec.input_file_id:  # the same request came twice at once
        await ring.files.delete(spec.input_file_id)
    return record


def _read(raw: bytes) -> tuple[list[_Asked], str]:
    """The requests, whose params are not looked at, and the digest of all."""
    many = InvalidRequestError(f"'requests' has 1 to {MAX_LINES} requests", param="requests")
    if raw.count(b'"custom_id"') > _FAR_TOO_MANY:
        raise many
    try:
        asked = _body_decoder.decode(raw)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        raise InvalidRequestError(what, param=where.rstrip("`").lstrip(".") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not 1 <= len(asked.requests) <= MAX_LINES:
        raise many
    seen: set[str] = set()
    for number, each in enumerate(asked.requests):
        if not _CUSTOM_ID.fullmatch(each.custom_id):
            raise InvalidRequestError("has 1 to 64 letters, digits, '-' and '_'", param=f"requests[{number}].custom_id")
        if each.custom_id in seen:
            raise InvalidRequestError("was used before", param=f"requests[{number}].custom_id")
        seen.add(each.custom_id)
        if len(memoryview(each.params)) > _MAX_PARAMS:
            raise PayloadTooLargeError(f"has more than {_MAX_PARAMS} bytes", param=f"requests[{number}].params")
    return asked.requests, hashlib.sha256(raw).hexdigest()


async def _check(ring: Ring, asked: Sequence[_Asked]) -> None:
    """Refuse what would fail all of them: params that are no JSON object, another model, one that is not there."""
    named: tuple[Any, Any] | None = None
    for number, each in enumerate(asked):
        where = f"requests[{number}].params"
        if await _is_too_much(ring, each.params):
            continue  # is this request's own result
        try:
            long = len(memoryview(each.params)) > LONG_BYTES
            params = await aside(_params_decoder.decode, each.params) if long else _params_decoder.decode(each.params)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequestError(f"is not a JSON object: {error}", param=where) from None
        names = params.get("model"), params.get("adapter") or params.get("lora_adapter")
        if named is None:
            named = names
            await _check_model(ring, *names, where)
        elif names != named:
            raise UnsupportedParameterError(
                "all requests of a batch are for one model, that of the first", param=f"{where}.model"
            )
        if number % 64 == 63:
            await asyncio.sleep(0)


async def _is_too_much(ring: Ring, params: msgspec.Raw) -> bool:
    look = partial(too_much, params, MESSAGES, ring.settings)
    return (await aside(look) if len(memoryview(params)) > LONG_BYTES else look()) is not None


async def _check_model(ring: Ring, model: Any, adapter: Any, where: str) -> None:
    if not (isinstance(model, str | None) and isinstance(adapter, str | None)):
        raise InvalidRequestError("must be a text", param=f"{where}.model")
    with contextlib.suppress(ServiceUnavailableError):  # the batch waits for a worker
        await find_job_target(ring, model, adapter or "", "follow")


async def _write(ring: Ring, spec: BatchSpec, asked: Sequence[_Asked]) -> StoredFile:
    """The requests as the lines of a batch."""
    writer = ring.files.writer(spec.input_file_id)
    try:
        for each in asked:
            long = len(memoryview(each.params)) > LONG_BYTES
            await writer.add(await aside(_line, each) if long else _line(each))
        # It is read before the batch expires, and deleted when the batch has ended.
        return await writer.close(f"{spec.id}.jsonl", "batch", 2 * WINDOW_S, spec.tenant, listed=False)
    except BaseException:
        await writer.discard()
        raise


def _line(asked: _Asked) -> bytes:
    params = bytes(asked.params).translate(_BREAKS)
    line = b'{"custom_id":"%s","method":"POST","url":"%s","body":%s}\n'
    return line % (asked.custom_id.encode(), MESSAGES.encode(), params)


def _same(found: BatchRecord, digest: str) -> BatchRecord:
    """The batch under an idempotency key, when it is the one that is asked for again."""
    if found.spec.digest != digest:
        raise ConflictError(f"this idempotency key belongs to another batch, {found.spec.id}")
    return found


@router.get(
    "/v1/messages/batches",
    summary="List Message Batches (Anthropic)",
    response_class=Response,
    responses=described("A page of Message Batches"),
)
async def list_message_batches(
    request: Request,
    ring: TheRing,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    after_id: Annotated[str, Query(description="the id of the batch after which the page begins")] = "",
    before_id: Annotated[str, Query(description="the id of the batch before which the page ends")] = "",
) -> Response:
    """Returns batches, the newest ones first."""
    if after_id and before_id:
        raise InvalidRequestError("does not go with 'after_id'", param="before_id")
    try:
        found, more = await ring.batches.page(
            limit, after_id or before_id, asker(), prefix=PREFIX, newest_first=not before_id
        )
    except UnknownBatchError as error:
        error.param = "before_id" if before_id else "after_id"
        raise
    shown = [batch_object(record, request) for record in (reversed(found) if before_id else found)]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return json_reply({"data": shown, "has_more": more, **ends})


@router.get(
    "/v1/messages/batches/{batch_id}",
    summary="Poll a Message Batch (Anthropic)",
    response_class=Response,
    responses=_OK,
)
async def retrieve_message_batch(batch_id: str, request: Request, ring: TheRing) -> Response:
    """Returns the batch with its status, its counts and the URL of its results."""
    return _shown(await ring.batches.find(batch_id, PREFIX), request)


@router.get(
    "/v1/messages/batches/{batch_id}/results",
    summary="Read the results of a Message Batch (Anthropic)",
    response_class=Response,
    responses=described("JSONL: `custom_id` and `result` of each request, in their order"),
)
async def message_batch_results(batch_id: str, ring: TheRing) -> Response:
    """Streams the result of each request that has one."""
    record = await ring.batches.find(batch_id, PREFIX)
    if record.state not in ENDED:
        raise InvalidRequestError(f"batch {batch_id} has no results yet: its requests are being processed")
    try:
        file = await ring.files.find(record.spec.output_file_id)
    except UnknownFileError as error:
        error.message = f"the results of batch {batch_id} are gone: their time to live is over, or they were lost"
        raise
    headers = {"content-length": str(file.bytes)}
    return StreamingResponse(ring.files.read(file), headers=headers, media_type="application/x-jsonl")


@router.post(
    "/v1/messages/batches/{batch_id}/cancel",
    summary="Cancel a Message Batch (Anthropic)",
    response_class=Response,
    responses=_OK,
)
async def cancel_message_batch(batch_id: str, request: Request, ring: TheRing) -> Response:
    """End it; what has been answered stays."""
    try:
        return _shown(await cancel(ring, batch_id, PREFIX), request)
    except ConflictError:  # clients try again after 409
        raise InvalidRequestError(f"batch {batch_id} cannot be canceled: its processing has ended") from None


@router.delete(
    "/v1/messages/batches/{batch_id}",
    summary="Delete a Message Batch (Anthropic)",
    response_class=Response,
    responses=described("Its id"),
)
async def delete_message_batch(batch_id: str, ring: TheRing) -> Response:
    """Forget one that has ended, with its requests and results."""
    record = await ring.batches.find(batch_id, PREFIX)
    if record.state not in ENDED:
        raise InvalidRequestError(f"batch {batch_id} is being processed: cancel it first")
    for file_id in (record.spec.input_file_id, record.spec.output_file_id):
        with contextlib.suppress(UnknownFileError):
            await ring.files.delete(file_id)
    if record.job:
        with contextlib.suppress(UnknownJobError, ServiceUnavailableError, InvalidRequestError):
            jobs = ring_keeping(ring, record.ring).jobs
            try:
                await jobs.delete(record.job)
            except ConflictError:  # it runs on though its batch has failed; no client waits for its results
                await jobs.cancel(record.job)
    await ring.batches.delete(record.spec)  # last: until then the delete may be repeated
    return json_reply({"id": batch_id, "type": "message_batch_deleted"})


def _shown(record: BatchRecord, request: Request) -> Response:
    return json_reply(batch_object(record, request))


def batch_object(record: BatchRecord, request: Request) -> dict[str, Any]:
    """The batch as Anthropic's Message Batch object."""
    spec, ended = record.spec, record.state in ENDED
    archived_at = record.ended_at + spec.output_ttl_s if ended else 0
    archived = ended and archived_at <= time.time()
    url = f"{str(request.base_url).rstrip('/')}/v1/messages/batches/{spec.id}/results"
    status = "canceling" if record.cancelling_at else "in_progress"
    return {
        "id": spec.id,
        "type": "message_batch",
        "processing_status": "ended" if ended else status,
        "request_counts": _counts(record, ended=ended),
        "created_at": _moment(spec.created_at),
        "expires_at": _moment(spec.expires_at),
        "ended_at": _moment(record.ended_at),
        "cancel_initiated_at": _moment(record.cancelling_at),
        "archived_at": _moment(archived_at) if archived else None,
        "results_url": url if record.has_output and ended and not archived else None,
    }


def _counts(record: BatchRecord, *, ended: bool) -> dict[str, int]:
    """Requests by what has become of them; as Anthropic's, they are all processed until the batch has ended."""
    if not ended:
        return {"processing": record.lines, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    others = record.completed + record.cancelled + record.expired
    return {
        "processing": 0,
        "succeeded": record.completed,
        "errored": record.lines - others,
        "canceled": record.cancelled,
        "expired": record.expired,
    }


def _moment(at: int) -> str | None:
    """The Unix time in the form of RFC 3339."""
    return rfc3339(at) if at else None
