"""Bounds on what a client may send, checked before anything is parsed."""

import asyncio
import re
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import error_response
from shared.errors import InvalidRequestError, PayloadTooLargeError
from shared.settings import ApiSettings

MAX_JSON_DEPTH = 64
BODY_WITHIN_S = 30.0  # of everything but uploads
TRAJECTORIES = "/v1/training/update"  # token ids and log-probabilities: long bodies of many numbers
BYTES_PER_NUMBER = 8

UPLOADS = re.compile(
    r"/v1/files|/v1/jobs|/v1/adapters|/v1/adapters/[^/]+/versions|/upload_adapter|/update_adapter_weights"
)
_UNSAID = ("", "application/x-www-form-urlencoded")  # what `curl -d` says: only the dashboard takes such forms
_STRING = re.compile(rb'"(?:[^"\\]++|\\.?)*+(?:"|\Z)', re.DOTALL)  # possessive: one pass, whatever the text
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


class BodyLimit:
    """Bounds request bodies: by Content-Length, while reading, and JSON by its depth and its number of values.

    Uploads are multipart bodies, which their routes stream to disk; they have a bound of their own. To any other route
    a multipart body is one like all others: it would be read into memory. A body of no said type is JSON.
    """

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        if headers.get("content-type", "") in _UNSAID and not scope["path"].startswith("/dashboard"):
            headers["content-type"] = "application/json"
        upload = is_multipart(headers) and UPLOADS.fullmatch(scope["path"]) is not None
        limit, most_values = self._bounds(scope["path"], upload)
        detail = f"the body is larger than {limit} bytes"
        if scope["path"] == "/v1/jobs" and not upload:
            detail += "; upload many prompts as JSONL (multipart/form-data)"
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            await error_response(PayloadTooLargeError(detail))(scope, receive, send)
            return
        read, until = 0, time.monotonic() + BODY_WITHIN_S
        held: list[bytes] | None = None if upload else []  # until the whole body has been looked at

        async def bounded() -> Message:
            nonlocal read, held
            while True:
                message = await (receive() if held is None else _in_time(receive, until))
                if message["type"] != "http.request":
                    return message
                read += len(message.get("body", b""))
                if read > limit:
                    raise HTTPException(413, detail)
                if held is None:
                    return message
                held.append(message.get("body", b""))
                if not message.get("more_body"):
                    body, held = b"".join(held), None
                    try:
                        check_shape(body, most_values)
                    except InvalidRequestError as error:  # FastAPI lets no other error out of a body
                        raise HTTPException(400, error.message) from error
                    return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, bounded, send)

    def _bounds(self, path: str, upload: bool) -> tuple[int, int]:
        """Bytes of a body, and values in it."""
        limit, most_values = self._settings.max_request_bytes, self._settings.max_json_values
        if upload:
            return self._settings.max_upload_bytes, most_values
        if path == TRAJECTORIES:
            limit = self._settings.max_training_bytes
            most_values = max(most_values, limit // BYTES_PER_NUMBER)
        return limit, most_values


def is_multipart(headers: Headers) -> bool:
    """Whether a body is a form with files; the name of a media type may be written in any case."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data"


async def _in_time(receive: Receive, until: float) -> Message:
    try:
        async with asyncio.timeout(until - time.monotonic()):
            return await receive()
    except TimeoutError:
        raise HTTPException(400, f"the body did not arrive within {BODY_WITHIN_S:g} s") from None


def check_shape(body: bytes, max_values: int) -> None:
    """InvalidRequestError for JSON that is nested too deep or has too many values; whether it is JSON is not asked.

    Linear in the body's length: strings are cut out, and what is left is looked at by counting and replacing.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH and body.count(b",") < max_values:
        return
    bare = _STRING.sub(b"", body)
    if bare.count(b",") >= max_values:
        raise InvalidRequestError(f"the body has more than {max_values} values (--max-json-values)")
    brackets = bare.translate(_ONE_KIND, _NOT_BRACKETS)
    for _ in range(MAX_JSON_DEPTH):
        brackets = brackets.replace(b"[]", b"")  # takes the innermost level off
    if b"[" in brackets:
        raise InvalidRequestError(f"the body is nested deeper than {MAX_JSON_DEPTH} levels")
