"""Requests to an api, for a trainer that knows nothing else of its ring.

Nothing of these requests is stored for feedback. An api that is away or busy is waited for, longer than its restart
takes. Every request that is sent again is safe to repeat; an upload whose answer was lost may leave a candidate version
behind that nobody promotes.
"""

from collections.abc import Mapping
from typing import Any, Self, TypeVar

import httpx
import msgspec
import structlog

from shared.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    ParallmError,
    ServiceUnavailableError,
    SetupError,
    from_code,
)
from shared.process.patience import BUSY, Patience, patiently
from shared.process.process_settings import JoinSettings
from shared.process.ring_query import api_url

log = structlog.get_logger()

T = TypeVar("T")
Files = Mapping[str, tuple[str, bytes]]

PATIENCE_S = 120.0
TIMEOUT_S = 120.0  # for an answer
CONNECT_S = 5.0


class _Problem(msgspec.Struct):
    message: str
    code: str | None = None
    param: str | None = None


class _Refusal(msgspec.Struct):
    error: _Problem


class HttpApi:
    """One api; a context manager."""

    def __init__(
        self,
        url: str,
        key: str = "",
        *,
        patience_s: float = PATIENCE_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url
        self._patience_s = patience_s
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"X-Parallm-Learn": "no", **({"Authorization": f"Bearer {key}"} if key else {})},
            timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=64),
            transport=transport,
        )

    @classmethod
    def of(cls, settings: JoinSettings) -> Self:
        """The api that --connect-to names, with its key."""
        return cls(api_url(settings.connect_to), settings.connect_key.get_secret_value())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: Any = None,
        *,
        patience_s: float | None = None,
        timeout_s: float = TIMEOUT_S,
        **params: str | int,
    ) -> T:
        """The answer to a JSON request; the api's refusal as an error of ours.

        ServiceUnavailableError when it stays away or busy, SetupError when it wants another key.
        """
        content = None if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"} if content is not None else {}
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S, pool=None)
        answer = await self._patiently(
            patience_s, method, path, params=params, content=content, headers=headers, timeout=timeout
        )
        return self._decoded(answer, kind)

    async def upload(self, path: str, kind: type[T], fields: Mapping[str, str], files: Files) -> T:
        """The answer to a form with files."""
        return self._decoded(await self._patiently(None, "POST", path, data=dict(fields), files=dict(files)), kind)

    async def lines(self, path: str, kind: type[T], **params: str | int) -> list[T]:
        """The answer of JSON lines."""
        answer = await self._patiently(None, "GET", path, params=params)
        return [msgspec.json.decode(line, type=kind) for line in answer.content.split(b"\n") if line.strip()]

    def _decoded(self, answer: httpx.Response, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.MsgspecError as error:
            raise SetupError(f"{answer.url} is no api of ours, or of another version: {error}") from error

    async def _patiently(self, patience_s: float | None, method: str, path: str, **request: Any) -> httpx.Response:
        patience = Patience(self._patience_s if patience_s is None else patience_s)

        def warn(trouble: httpx.Response | httpx.TransportError) -> None:
            log.warning("train.api_away", path=path, reason=_described(trouble), again_in_s=patience.pause_s)

        try:
            answer = await patiently(lambda: self._http.request(method, path, **request), patience, trouble=warn)
        except httpx.TransportError as error:
            raise ServiceUnavailableError(f"{self.url}{path}: {_described(error)}") from error
        if answer.status_code in BUSY:
            raise ServiceUnavailableError(f"{self.url}{path}: {_described(answer)}")
        return self._checked(answer)

    def _checked(self, answer: httpx.Response) -> httpx.Response:
        status, problem = answer.status_code, _problem(answer) if answer.is_error else None
        if problem is None:
            return answer
        if status in (401, 403):
            raise SetupError(f"{self.url} refuses the API key: set PARALLM_CONNECT_KEY, or give --connect-key")
        if problem.code:
            raise from_code(problem.code, problem.message)
        kinds: dict[int, type[ParallmError]] = {404: NotFoundError, 409: ConflictError}
        kind = kinds.get(status, InvalidRequestError if status < 500 else ServiceUnavailableError)
        raise kind(f"{answer.url.path}: {problem.message}")


def _described(trouble: httpx.Response | httpx.TransportError) -> str:
    """Reason why there is no answer yet."""
    if isinstance(trouble, httpx.Response):
        return f"{trouble.status_code}: {_problem(trouble).message}"
    return str(trouble) or type(trouble).__name__


def _problem(answer: httpx.Response) -> _Problem:
    try:
        return msgspec.json.decode(answer.content, type=_Refusal).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _Problem(f"{answer.status_code} {answer.text.strip()[:200]}")
