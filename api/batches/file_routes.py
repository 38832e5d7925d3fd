"""/v1/files: what batches read and write.

An upload is spooled to disk by the form parser, then goes to Redis in chunks, because api processes share nothing else.
"""

import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response, StreamingResponse

from api.batches import anthropic_files
from api.batches.uploads import upload_form
from api.callers.caller import asker
from api.http.anthropic_errors import speaks_anthropic
from api.http.errors import error_responses, json_reply
from api.http.limits import is_multipart
from api.ring.ring import Ring, ring_of
from shared.errors import InvalidRequestError, UnsupportedParameterError
from shared.redis.files.file_store import CHUNK_BYTES, StoredFile
from shared.redis.keys import DAY_S

router = APIRouter(tags=["openai"])
TheRing = Annotated[Ring, Depends(ring_of)]

TTL_S = 7 * DAY_S  # of a file that does not say
MIN_TTL_S, MAX_TTL_S = 3_600, 30 * DAY_S  # OpenAI's
PURPOSES = ("batch", "fine-tune", "evals", "user_data", "assistants", "vision")  # only a batch reads one here
_FIELDS = frozenset({"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"})
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "JSONL, one request a line"},
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": MIN_TTL_S, "maximum": MAX_TTL_S},
                    },
                }
            }
        },
    }
}


@router.post(
    "/v1/files",
    summary="Upload a file",
    openapi_extra=_BODY,
    response_class=Response,
    responses={200: {"description": "The file object"}, **error_responses(400, 413, 503)},
)
async def upload_file(request: Request, ring: TheRing) -> Response:
    """A file, as a rule for a batch; it lives for a week, or as long as `expires_after` says."""
    if not is_multipart(request.headers):
        raise InvalidRequestError("a file is uploaded as multipart/form-data with 'file' and 'purpose'", param="file")
    async with upload_form(request) as form:
        if speaks_anthropic(request.scope):
            file, purpose, ttl_s = anthropic_files.upload_of(form, TTL_S, MIN_TTL_S, MAX_TTL_S)
        else:
            file, purpose, ttl_s = _checked(form)
        writer = ring.files.writer()
        try:
            while data := await file.read(CHUNK_BYTES):
                await writer.add(data)
            if not writer.size:
                raise InvalidRequestError("the file is empty", param="file")
            mime_type = _printable(file.content_type or "application/octet-stream")
            name = _shown_name(file.filename)
            stored = await writer.close(name, purpose, ttl_s, asker().tenant, mime_type=mime_type)
        except BaseException:
            await writer.discard()
            raise
    return _shown(request, stored)


def _shown(request: Request, file: StoredFile) -> Response:
    return json_reply(anthropic_files.shown(file) if speaks_anthropic(request.scope) else file_object(file))


def _checked(form: FormData) -> tuple[UploadFile, str, int]:
    """File, purpose and seconds to live."""
    for name in form:
        if name not in _FIELDS:
            raise UnsupportedParameterError(f"unknown parameter '{name}'", param=name)
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise InvalidRequestError("the form field 'file' is required, as a file", param="file")
    if not isinstance(purpose, str) or purpose not in PURPOSES:
        raise InvalidRequestError(f"'purpose' must be one of {', '.join(PURPOSES)}", param="purpose")
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return file, purpose, TTL_S
    if anchor != "created_at":
        raise InvalidRequestError("must be 'created_at'", param="expires_after[anchor]")
    if not isinstance(seconds, str) or not re.fullmatch(r"[0-9]{1,9}", seconds):
        raise InvalidRequestError("must be a number of seconds", param="expires_after[seconds]")
    if not MIN_TTL_S <= int(seconds) <= MAX_TTL_S:
        raise InvalidRequestError(f"must be from {MIN_TTL_S} to {MAX_TTL_S}", param="expires_after[seconds]")
    return file, purpose, int(seconds)


def _shown_name(name: str | None) -> str:
    """Only ever shown: no path is made of it."""
    last = (name or "file.jsonl").replace("\\", "/").rpartition("/")[2]
    return _printable(last)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:255])


@router.get("/v1/files", summary="List files", response_class=Response, responses={**error_responses(400, 404)})
async def list_files(
    request: Request,
    ring: TheRing,
    purpose: Annotated[str, Query(description="such as batch or batch_output; without it all")] = "",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    after: Annotated[str, Query(description="the id after which to go on")] = "",
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """Files by time of creation."""
    if speaks_anthropic(request.scope):
        return json_reply(await anthropic_files.page_of(ring, request.query_params))
    found, more = await ring.files.list(purpose, limit, after, newest_first=order == "desc", asker=asker())
    return json_reply(page([file_object(file) for file in found], more))


@router.get("/v1/files/{file_id}", summary="Describe a file", response_class=Response, responses=error_responses(404))
async def retrieve_file(file_id: str, request: Request, ring: TheRing) -> Response:
    """Returns the file's name, size and purpose."""
    return _shown(request, await ring.files.find(file_id))


@router.get(
    "/v1/files/{file_id}/content",
    summary="Read a file",
    response_class=Response,
    responses={200: {"description": "The bytes", "content": {"application/jsonl": {}}}, **error_responses(404)},
)
async def file_content(file_id: str, ring: TheRing) -> Response:
    """Streams all bytes of the file."""
    file = await ring.files.find(file_id)
    headers = {"content-length": str(file.bytes)}
    return StreamingResponse(ring.files.read(file), headers=headers, media_type="application/jsonl")


@router.delete("/v1/files/{file_id}", summary="Delete a file", response_class=Response, responses=error_responses(404))
async def delete_file(file_id: str, request: Request, ring: TheRing) -> Response:
    """A batch that has been validated does not need its file any more."""
    await ring.files.delete(file_id)
    if speaks_anthropic(request.scope):
        return json_reply({"id": file_id, "type": "file_deleted"})
    return json_reply({"id": file_id, "object": "file", "deleted": True})


def file_object(file: StoredFile) -> dict[str, Any]:
    """The file as OpenAI's file object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def page(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """OpenAI's page of a list."""
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": more}
