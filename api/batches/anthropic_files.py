"""/v1/files as Anthropic has it: the same files, for requests with the header `anthropic-version`."""

import re
from typing import Any

from starlette.datastructures import FormData, QueryParams, UploadFile

from api.callers.caller import asker
from api.http.fields import rfc3339
from api.ring.ring import Ring
from shared.errors import InvalidRequestError, UnknownFileError, UnsupportedParameterError
from shared.redis.files.file_store import StoredFile

PURPOSE = "user_data"  # of their uploads, in OpenAI's words
_FIELDS = frozenset({"file", "expires_in_seconds"})
_PAGE, _CURSOR, _MOST, _MOST_IDS = 20, "page_", 1000, 100


def upload_of(form: FormData, ttl_s: int, least_s: int, most_s: int) -> tuple[UploadFile, str, int]:
    """File, purpose and seconds to live, by default `ttl_s`, of an upload."""
    for name in form:
        if name not in _FIELDS:
            raise UnsupportedParameterError(f"unknown parameter '{name}'", param=name)
    file, seconds = form.get("file"), form.get("expires_in_seconds")
    if not isinstance(file, UploadFile):
        raise InvalidRequestError("the form field 'file' is required, as a file", param="file")
    if seconds is None:
        return file, PURPOSE, ttl_s
    if not isinstance(seconds, str) or not re.fullmatch(r"[0-9]{1,9}", seconds):
        raise InvalidRequestError("must be a number of seconds", param="expires_in_seconds")
    if not least_s <= int(seconds) <= most_s:
        raise InvalidRequestError(f"must be from {least_s} to {most_s}", param="expires_in_seconds")
    return file, PURPOSE, int(seconds)


async def page_of(ring: Ring, query: QueryParams) -> dict[str, Any]:
    """A page of files, newest first."""
    named = [each for name in ("ids", "ids[]") for given in query.getlist(name) for each in given.split(",") if each]
    if named:
        return {"data": await _by_ids(ring, list(dict.fromkeys(named))), "next_page": None}
    limit, cursor = query.get("limit", str(_PAGE)), query.get("page", "")
    if not re.fullmatch(r"[0-9]{1,4}", limit) or not 1 <= int(limit) <= _MOST:
        raise InvalidRequestError(f"is a number from 1 to {_MOST}", param="limit")
    if cursor and not cursor.startswith(_CURSOR):
        raise InvalidRequestError(f"is the 'next_page' of another page: it begins with '{_CURSOR}'", param="page")
    try:
        found, more = await ring.files.list(
            "", int(limit), cursor.removeprefix(_CURSOR), newest_first=True, asker=asker()
        )
    except UnknownFileError as error:
        error.param = "page"
        raise
    return {"data": [shown(file) for file in found], "next_page": f"{_CURSOR}{found[-1].id}" if more else None}


async def _by_ids(ring: Ring, ids: list[str]) -> list[dict[str, Any]]:
    """Those of them that the asker sees."""
    if len(ids) > _MOST_IDS:
        raise InvalidRequestError(f"has at most {_MOST_IDS} ids", param="ids")
    files = []
    for file_id in ids:
        try:
            file = await ring.files.find(file_id)
        except UnknownFileError:
            continue
        if asker().sees(file.tenant):
            files.append(shown(file))
    return files


def shown(file: StoredFile) -> dict[str, Any]:
    """The file as Anthropic's file object."""
    return {
        "id": file.id,
        "type": "file",
        "filename": file.filename,
        "mime_type": file.mime_type,
        "size_bytes": file.bytes,
        "created_at": rfc3339(file.created_at),
        "expires_at": rfc3339(file.expires_at),
        "downloadable": True,
    }
