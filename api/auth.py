"""The optional API key, sent as `Authorization: Bearer <key>`."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import error_response
from shared.errors import AuthenticationError

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/metrics"})


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
