"""Bounds on what a client may send."""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import error_response
from shared.errors import PayloadTooLargeError


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
        if scope["path"] == "/v1/jobs" and not upload:
            detail += "; upload many prompts as JSONL (multipart/form-data)"
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
