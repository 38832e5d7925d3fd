"""What surrounds every request: its id, its log line, the API key, the bound on its body.

Plain ASGI, so that a streamed token passes one extra function call at most.
"""

import hmac
import re
import time
import uuid

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import error_response
from shared.errors import AuthenticationError, PayloadTooLargeError

log = structlog.get_logger()

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/metrics"})


class RequestContext:
    """Gives each request an id (the client's `x-request-id` if it sent one), and logs how it ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                took = round(1000 * (time.perf_counter() - began), 1)
                fields = {"method": scope["method"], "path": scope["path"], "status": status, "ms": took}
                (log.debug if scope["path"] in OPEN_PATHS else log.info)("api.request", **fields)


class ApiKey:
    """Refuses requests without the bearer key; probes stay open."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._admits(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = AuthenticationError("wrong or missing API key: send it as `Authorization: Bearer <key>`")
        await error_response(error)(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._key)


class BodyLimit:
    """Bounds request bodies before anything is parsed: by Content-Length, and while reading.

    Multipart bodies are uploads, which routes stream to disk; they have a bound of their own.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_upload_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_upload_bytes = max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        upload = headers.get("content-type", "").startswith("multipart/form-data")
        limit = self._max_upload_bytes if upload else self._max_bytes
        detail = f"the body is larger than {limit} bytes"
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            await error_response(PayloadTooLargeError(detail))(scope, receive, send)
            return
        read = 0

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > limit:
                raise HTTPException(413, detail)
            return message

        await self._app(scope, bounded, send)
