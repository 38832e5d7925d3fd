"""From the address of an api to the Redis of its ring, for `--connect-to node1:8000`.

The api tells where its Redis is and never how to get in, so a password has to be known here. An address that means
"this machine" is of use on that machine only, and is refused elsewhere with what to do about it.
"""

import ipaddress
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from shared.errors import ServiceUnavailableError, SetupError
from shared.machine.network import words_of
from shared.redis.connection.address import SCHEMES, RedisUrl


class _Address(msgspec.Struct):
    redis: str
    username: str = ""
    needs_password: bool = False


async def find_redis(
    target: str, *, api_key: str = "", password: str = "", transport: httpx.AsyncBaseTransport | None = None
) -> str:
    """The Redis URL of a Redis URL (itself) or an api's URL.

    SetupError with the reason when there is none, ServiceUnavailableError when nobody answers (yet).
    """
    if target.partition("://")[0] in SCHEMES:
        return target
    api = api_url(target)
    address = await _ask(api, api_key, transport)
    parts = RedisUrl.of(address.redis)
    here = parts.scheme == "unix" or _is_loopback(urlsplit(f"//{parts.hosts.split(',')[0]}").hostname or "")
    if here and not _is_loopback(urlsplit(api).hostname or ""):
        raise SetupError(
            f"the ring of {api} keeps its Redis to its own machine ({address.redis}): start it with --redis "
            "redis://HOST:PORT that both machines reach, or join on that machine"
        )
    if not address.needs_password:
        return address.redis
    if not password:
        raise SetupError(
            f"the Redis of {api} ({address.redis}) wants a password, which an api never gives out: "
            "set PARALLM_REDIS_PASSWORD, or give the whole URL with --redis"
        )
    return f"{parts.scheme}://{quote(address.username)}:{quote(password, safe='')}@{parts.hosts}{parts.path}"


def api_url(target: str) -> str:
    """`host:port`, or a URL with or without `/v1`, as an api's base URL."""
    url = target if "://" in target else f"http://{target}"
    parts = urlsplit(url)
    try:
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise SetupError(f"{target!r} is neither a ring's Redis (redis://HOST:PORT) nor an api (HOST:PORT)")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


async def _ask(api: str, api_key: str, transport: httpx.AsyncBaseTransport | None) -> _Address:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(timeout=10, transport=transport, trust_env=False) as http:
            answer = await http.get(f"{api}/v1/ring", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServiceUnavailableError(f"no api answers at {api}: {_words(error)}") from error
    if answer.status_code == 401:
        raise SetupError(f"{api} wants an API key: set PARALLM_CONNECT_KEY, or give --connect-key")
    if answer.status_code == 403:
        raise SetupError(
            f"{api} wants an admin's key: this one is a tenant's (PARALLM_CONNECT_KEY, --connect-key), with which a "
            "trainer runs --over-http"
        )
    if answer.status_code >= 500:
        raise ServiceUnavailableError(f"{api} answers {answer.status_code}: {answer.text[:200]}")
    try:
        return msgspec.json.decode(answer.content, type=_Address)
    except msgspec.MsgspecError as error:
        raise SetupError(f"{api} is no api of ours: /v1/ring answered {answer.status_code}") from error


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _words(error: BaseException) -> str:
    """The error's text, with the cause's hint where the system gives one."""
    text = str(error) or type(error).__name__
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return text if cause is None else words_of(cause, text)
