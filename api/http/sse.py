"""Server-sent events straight over ASGI: bytes go out as they are, and a client that leaves is noticed at once."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.callers.caller import until_disconnected
from api.http.errors import error_object
from shared.errors import ServiceUnavailableError

T = TypeVar("T")

log = structlog.get_logger()

SHUTTING_DOWN = ServiceUnavailableError("the server is shutting down")
_CUT_OFF = b"data: %s\n\ndata: [DONE]\n\n" % error_object(SHUTTING_DOWN)
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """Sends what `events` yields, each item in one write. The generator is closed when the client disconnects.

    `cut_off`: what a client gets last when the server ends before its stream does.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], cut_off: bytes = _CUT_OFF) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._cut_off = cut_off

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            if await until_disconnected(self._pump(send), receive) is None:
                log.info("api.client_left", path=scope["path"])
        except asyncio.CancelledError:  # the server has waited long enough for us at shutdown
            await send({"type": "http.response.body", "body": self._cut_off})
            raise

    async def _pump(self, send: Send) -> bool:
        async with contextlib.aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return True
