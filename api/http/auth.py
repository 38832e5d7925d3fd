"""API keys at the door, sent as `Authorization: Bearer <key>` or as `x-api-key`."""

from collections.abc import Sequence

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.callers.caller import ApiKey, calling
from api.http.api_keys import KeyRing
from api.http.errors import error_response
from shared.errors import AuthenticationError, ForbiddenError

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/ping", "/metrics", "/api/hello"})
OPEN_DOWNLOADS = "downloads"  # under /api/v1: addresses that are secret themselves (api/tinker/downloads.py)


class RequireKey:
    """Refuses requests without a known key; probes stay open. The key found stands in `request.state.api_key`."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        key = self._keys.find(presented(Headers(scope=scope)))
        if key is None:
            error = AuthenticationError(
                "wrong or missing API key: send it as `Authorization: Bearer <key>` or as `x-api-key: <key>`"
            )
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["api_key"] = key
        calling.set(key)
        structlog.contextvars.bind_contextvars(key=key.name)
        await self._app(scope, receive, send)


def is_open(path: str) -> bool:
    """Probes, addresses of downloads; the dashboard, which asks for the key itself (api/ops/dashboard/session.py)."""
    return path in OPEN_PATHS or path == "/dashboard" or path.startswith(("/dashboard/", f"/api/v1/{OPEN_DOWNLOADS}/"))


class OwnOrigin:
    """For a server without keys: refuses what another site's page makes a browser send.

    Browsers send uploads and plain texts anywhere without asking, and this server may stand on their machine. Where a
    key is wanted this is not needed: a page does not have it.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            headers = Headers(scope=scope)
            origin = headers.get("origin", "")
            own = origin.partition("://")[2] == headers.get("host", "")
            if origin and not own and not self._allowed & {origin, "*"}:
                error = ForbiddenError(f"pages of {origin[:100]!r} may not call this server (--cors-origins)")
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def key_of(scope: Scope) -> ApiKey | None:
    """The key that came with a request; None when the server wants none."""
    found: ApiKey | None = scope.get("state", {}).get("api_key")
    return found


def presented(headers: Headers) -> str:
    """The key that a request carries, in OpenAI's header or else in Anthropic's; "" without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
