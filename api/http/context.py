"""The surroundings of every request: its id, on every log line and in the response, and a line that says how it ended.

Plain ASGI, as all our middleware, so that a streamed token passes one extra function call at most.
"""

import asyncio
import re
import time
import uuid

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.callers.caller import LEARN, NO_CACHE, Client, client, may_learn, named_session, no_cache, session_in
from api.http.anthropic_errors import speaks_anthropic
from api.http.auth import OPEN_PATHS
from api.http.errors import error_response, from_fault
from api.http.sse import SHUTTING_DOWN
from shared.telemetry import tracing
from shared.telemetry.metrics import Tally

log = structlog.get_logger()

_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
PART_BYTES = 1 << 20  # of a long answer: it is copied on its way to the socket, 80 MB of embeddings for 0.1 s
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


async def _send_in_parts(message: Message, send: Send) -> None:
    body, more = message["body"], message.get("more_body", False)
    for at in range(0, len(body), PART_BYTES):
        end = at + PART_BYTES
        await send({"type": message["type"], "body": body[at:end], "more_body": more or end < len(body)})


class RequestContext:
    """Gives each request an id (the client's `x-request-id` if it sent one), and logs how it ended.

    It stands outside everything else, so here end all unforeseen errors.
    """

    def __init__(self, app: ASGIApp, tally: Tally) -> None:
        self._app = app
        self._tally = tally

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        client.set(Client((scope.get("client") or ("",))[0], receive))
        no_cache.set(headers.get(NO_CACHE, ""))
        may_learn.set(headers.get(LEARN, ""))
        named_session.set(session_in(scope["headers"]))
        began, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, sent = message["status"], MutableHeaders(scope=message)
                sent["x-request-id"] = request_id
                if speaks_anthropic(scope):
                    sent["request-id"] = request_id
            if len(message.get("body", b"")) > PART_BYTES:
                await _send_in_parts(message, send)
            else:
                await send(message)

        tracing.annotate({"parallm.request_id": request_id})
        with structlog.contextvars.bound_contextvars(request_id=request_id, **tracing.log_fields()):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception as fault:
                log.exception("api.fault", path=scope["path"])
                if status:  # too late for an error object
                    raise
                await error_response(from_fault(fault))(scope, receive, send_with_id)
            except asyncio.CancelledError:  # at the end of the grace of a shutdown: it waits for Redis, perhaps
                if status:
                    raise
                await error_response(SHUTTING_DOWN)(scope, receive, send_with_id)
            finally:
                seconds = time.perf_counter() - began
                self._count(scope, status, seconds)
                took = round(1000 * seconds, 1)
                fields = {"method": scope["method"], "path": scope["path"], "status": status, "ms": took}
                (log.debug if scope["path"] in OPEN_PATHS else log.info)("api.request", **fields)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        """By the route's pattern, so that ids in paths make no series of their own; 499: the client has left.

        What no route answers is counted together, in particular methods that a path does not have.
        """
        route = getattr(scope.get("route"), "path", "other") if status != 405 else "other"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._tally.counter("mlx_parallm_http_requests_total", method, route, str(status or 499)).add()
        self._tally.histogram("mlx_parallm_http_request_seconds", route).observe(seconds)
