"""The names that this server answers to: what keeps a web page from calling it under a name of its own.

A page may let its own host name point to 127.0.0.1 after it was loaded (DNS rebinding). Its browser then takes this
server for the page's, so no origin is foreign and CORS does not matter; only the Host header shows it. An address is no
name that anybody can point elsewhere, and a server that wants keys is of no use to a page that has none.
"""

import ipaddress
import socket
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.http.errors import error_response
from shared.errors import ForbiddenError
from shared.process.api_settings import ApiSettings

OF_CONTAINERS = "host.docker.internal"  # how a container calls the machine that it runs on; no public name


class OwnHost:
    """Refuses requests to a host that is not one of ours (403). No Host at all is no browser."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = name_of(Headers(scope=scope).get("host", ""))
            if host and host not in self._allowed and not is_address(host) and not _is_local(host):
                error = ForbiddenError(
                    f"this server does not answer to the name {host[:100]!r}: ask it by its address, or start it with "
                    "--allowed-hosts and the name"
                )
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def allowed_hosts(settings: ApiSettings, *, keys: bool) -> frozenset[str] | None:
    """Names that are taken besides addresses and loopback names; None: any."""
    if "*" in settings.allowed_hosts or (not settings.allowed_hosts and (keys or settings.uds)):
        return None
    return frozenset(settings.allowed_hosts) | {settings.host.lower(), *_names_of_this_machine(), OF_CONTAINERS}


def name_of(host: str) -> str:
    """The name or address in a Host header, without port, brackets and the root's dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_local(host: str) -> bool:
    return host == "localhost" or host.endswith(".localhost")


def _names_of_this_machine() -> frozenset[str]:
    full = socket.gethostname().lower()
    short = full.partition(".")[0]
    return frozenset({full, short, f"{short}.local"})
