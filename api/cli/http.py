"""How the client reads answers, and which errors it raises for refusals and for servers that do not answer."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

import httpx
import msgspec

from shared.errors import ParallmError

T = TypeVar("T")


class RequestFailedError(ParallmError):
    """The server refused or failed a request; `http_status` 0 means that it could not be reached."""

    def __init__(self, message: str, http_status: int = 0, error_code: str = "") -> None:
        super().__init__(message)
        self.http_status = http_status
        self.error_code = error_code


@asynccontextmanager
async def reached(url: str, request: AbstractAsyncContextManager[httpx.Response]) -> AsyncIterator[httpx.Response]:
    """A streamed answer that is no error."""
    try:
        async with request as response:
            if response.is_error:
                await response.aread()
                raise refusal(response)
            yield response
    except httpx.TransportError as error:
        raise unreachable(url, error) from error


async def byte_lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines that end in \\n only: JSON may hold the other characters at which httpx would split."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.strip()
    if rest.strip():
        yield rest.strip()


def decode(response: httpx.Response, kind: type[T]) -> T:
    """The body of an answer as `kind`; RequestFailedError when it is something else."""
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.MsgspecError as error:
        raise RequestFailedError(f"{response.url} answered something else: {error}", response.status_code) from error


def refusal(response: httpx.Response) -> RequestFailedError:
    """The error for a refused request, in the server's own words if it is one of ours."""
    try:
        error = msgspec.json.decode(response.content)["error"]
        return RequestFailedError(str(error["message"]), response.status_code, str(error.get("code") or ""))
    except (msgspec.MsgspecError, KeyError, TypeError):
        text = " ".join(response.text.split())[:200]
        return RequestFailedError(f"{response.url} answered {response.status_code}: {text}", response.status_code)


def unreachable(url: str, error: httpx.TransportError) -> RequestFailedError:
    """The error for a server that does not answer."""
    reason = str(error) or type(error).__name__
    return RequestFailedError(f"cannot reach {url} ({reason}); start it with mlx_parallm_serve, or give --url")
