"""Fetches an image by https from a host that the operator has named, and from nowhere else.

Invariants. The address is looked up once, must be a public one, and is the one that is connected to, so that a name
cannot mean another machine a moment later; the certificate is checked against the name. A redirect is followed only to
the same host. Bytes and seconds are bounded, whatever the other side says of its length; compressed bytes, which may
come to any number, are refused.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from urllib.parse import urljoin, urlsplit

import httpx

from api.checks.public_addresses import addresses_of, is_public
from shared.errors import InvalidRequestError, ServiceUnavailableError

MOST_HOPS = 3
MOST_URL_CHARS = 8192  # to read millions of them would stop the event loop
Resolve = Callable[[str, int], Awaitable[str]]


async def public_address(host: str, port: int) -> str:
    """An address of a host; InvalidRequestError when it has one that is not public, or none."""
    try:
        addresses = await addresses_of(host, port)
    except (OSError, UnicodeError):
        raise InvalidRequestError(f"the host of an image, '{host}', is not known") from None
    if not addresses or not all(map(is_public, addresses)):
        raise InvalidRequestError(f"the host of an image, '{host}', is not a public one")
    return addresses[0]


class ImageFetch:
    """Fetches images from the hosts that the operator has named."""

    def __init__(
        self, hosts: Collection[str], most_bytes: int, limit_s: float, resolve: Resolve = public_address
    ) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._most_bytes = most_bytes
        self._limit_s = limit_s
        self._resolve = resolve
        self._client: httpx.AsyncClient | None = None

    async def get(self, url: str) -> bytes:
        """The bytes; InvalidRequestError where they may not be fetched, or the host does not give them."""
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._followed(url)
        except TimeoutError:
            raise InvalidRequestError(f"the image was not fetched within {self._limit_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise InvalidRequestError(f"the image cannot be fetched ({type(error).__name__})") from None

    async def close(self) -> None:
        """Close the connections at shutdown."""
        if self._client is not None:
            await self._client.aclose()

    async def _followed(self, url: str) -> bytes:
        host = self._checked(url)
        for _ in range(MOST_HOPS):
            status, found = await self._once(url, host)
            if not isinstance(found, str):
                return found
            url = urljoin(url, found)
            if self._checked(url) != host:
                raise InvalidRequestError(f"the image's host redirects ({status}) to another one")
        raise InvalidRequestError(f"the image's host redirects more than {MOST_HOPS} times")

    def _checked(self, url: str) -> str:
        """The host of a URL that may be fetched."""
        if len(url) > MOST_URL_CHARS:
            raise InvalidRequestError(f"the URL of an image has more than {MOST_URL_CHARS} characters")
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port
        except ValueError:
            raise InvalidRequestError("the URL of an image is not one") from None
        if parts.scheme != "https" or parts.username is not None or port not in (None, 443):
            raise InvalidRequestError("an image is given as a `data:` URL, or by https on its usual port")
        if host not in self._hosts:
            raise InvalidRequestError(
                f"this server does not fetch images from '{host[:100]}' (--allowed-image-hosts); send a `data:` URL"
            )
        return host

    async def _once(self, url: str, host: str) -> tuple[int, bytes | str]:
        """Status, and the bytes, or where they are said to be."""
        parts = urlsplit(url)
        address = await self._resolve(host, 443)
        target = parts._replace(netloc=f"[{address}]" if ":" in address else address, fragment="").geturl()
        if self._client is None:
            # A connection is known by its address, and a certificate belongs to a name: none is used for a second one.
            unshared = httpx.Limits(max_keepalive_connections=0)
            self._client = httpx.AsyncClient(trust_env=False, timeout=self._limit_s, limits=unshared)
        named = {
            "headers": {"host": host, "accept": "image/*", "accept-encoding": "identity"},
            "extensions": {"sni_hostname": host},
        }
        async with self._client.stream("GET", target, **named) as response:  # type: ignore[arg-type]
            status = response.status_code
            if status in (301, 302, 303, 307, 308) and "location" in response.headers:
                return status, response.headers["location"]
            if status >= 500:
                raise ServiceUnavailableError(f"the image's host answers {status}; try again shortly")
            if status != 200:
                raise InvalidRequestError(f"the image's host answers {status}")
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                raise InvalidRequestError("the image's host sends it compressed, which it was not asked to")
            data = bytearray()
            async for chunk in response.aiter_raw():
                data += chunk
                if len(data) > self._most_bytes:
                    raise InvalidRequestError(f"the image has more than {self._most_bytes} bytes")
            return status, bytes(data)
