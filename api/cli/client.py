"""A client of the HTTP API: jobs from submission to results, chat, models. Imports no FastAPI and no mlx.

Requests that change nothing, and submissions (they carry an idempotency key), are repeated while the server restarts or
says that it is busy, for about `patience_s` seconds.
"""

import asyncio
import hashlib
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from tempfile import SpooledTemporaryFile
from types import TracebackType
from typing import IO, Any, Generic, Protocol, Self, TypeVar, cast
from urllib.parse import quote

import httpx
import msgspec

from api.cli.http import RequestFailedError, byte_lines, decode, reached, refusal, unreachable
from shared.adapters import AdapterManifest
from shared.jobs import TERMINAL, JobInput, JobKind, JobStatus, RewardSpec
from shared.process.patience import BUSY, Patience, patiently
from shared.sequences import AdapterPolicy
from shared.trajectories import Trajectory

T = TypeVar("T")
Progress = TypeVar("Progress", bound="_InProgress")

DEFAULT_URL = "http://127.0.0.1:8000"
POLL_S = (0.1, 2.0)  # first and longest pause between two looks at a job
ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors", "adapter_model.safetensors")


class JobRequest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A job to submit, without its inputs; the fields are those of `POST /v1/jobs` (docs/reference/jobs.md)."""

    kind: JobKind
    model: str
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    top_logprobs: int | None = None
    reward: RewardSpec | None = None
    score_logprobs: bool | None = None
    adapter: str = ""
    adapter_policy: AdapterPolicy | None = None
    deadline_s: float | None = None
    metadata: dict[str, Any] = {}
    idempotency_key: str = ""


class ModelInfo(msgspec.Struct, frozen=True):
    """A model that can be asked for."""

    id: str
    created: int = 0
    owned_by: str = ""
    parent: str | None = None  # of an adapter: its base model
    max_model_len: int = 0  # tokens of its context
    context_length: int = 0  # the same, or less where no worker's memory holds so much; 0: an older server
    root: str = ""  # of an alias: the model that it stands for
    state: str = "ready"  # of a model of the catalogue: whether it is loaded

    @property
    def is_base(self) -> bool:
        """True for a model by its own name; False for an adapter or an alias."""
        return not self.parent and self.root in ("", self.id)


class GeneratedText(msgspec.Struct, frozen=True):
    """One completion of `POST /generate`."""

    request_id: str
    policy_version: int  # adapter version of its tokens; 0: the base
    prompt_ids: list[int]
    completion_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[float] | None = None
    step_id: int | str | None = None
    metadata: dict[str, Any] = {}


class AdapterLoaded(msgspec.Struct, frozen=True):
    """Answer to an upload of an adapter version."""

    status: str
    policy_version: int
    message: str


class Listing(msgspec.Struct, Generic[T]):
    """The answer of a route that lists things."""

    data: list[T]


class _InProgress(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def status(self) -> str: ...


class InferenceClient:
    """An asynchronous client; use it as a context manager, or call `aclose`."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str = "",
        timeout_s: float = 600,
        patience_s: float = 30,
        connections: int = 100,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        if not (api_key.isascii() and api_key.isprintable()):
            raise RequestFailedError("an API key is of printable ASCII characters only")
        self._patience_s = patience_s
        try:
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=httpx.Timeout(timeout_s, connect=5, pool=None),
                limits=httpx.Limits(max_connections=connections),
                transport=transport,
            )
        except httpx.InvalidURL as error:
            raise RequestFailedError(f"{url!r} is no URL: {error}") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    # -- jobs

    async def submit(self, request: JobRequest, inputs: IO[bytes] | Iterable[JobInput | dict[str, Any]]) -> JobStatus:
        """Upload the inputs (a file of JSON lines, or what makes such lines) and start the job."""
        if not request.idempotency_key:
            request = msgspec.structs.replace(request, idempotency_key=uuid.uuid4().hex)
        with SpooledTemporaryFile(max_size=8_388_608) as file:  # a repeated upload starts over
            for part in _lines(inputs):
                file.write(part)

            async def send() -> httpx.Response:
                file.seek(0)
                return await self._http.post(
                    "/v1/jobs",
                    files={
                        "spec": (None, msgspec.json.encode(request), "application/json"),
                        "file": ("inputs.jsonl", cast(IO[bytes], file), "application/jsonl"),
                    },
                )

            return decode(await self._patiently(send), JobStatus)

    async def status(self, job_id: str) -> JobStatus:
        """How far a job is."""
        return await self.call("GET", f"/v1/jobs/{job_id}", JobStatus)

    async def jobs(self, limit: int = 20) -> list[JobStatus]:
        return (await self.call("GET", "/v1/jobs", Listing[JobStatus], limit=limit)).data

    async def cancel(self, job_id: str) -> JobStatus:
        """Stop a job; what is done stays."""
        return await self.call("POST", f"/v1/jobs/{job_id}/cancel", JobStatus)

    async def wait(
        self, job_id: str, on_progress: Callable[[JobStatus], None] | None = None, timeout_s: float | None = None
    ) -> JobStatus:
        """Poll until the job has ended; TimeoutError when that takes longer than `timeout_s`."""
        return await poll(lambda: self.status(job_id), TERMINAL, on_progress, timeout_s)

    async def results(self, job_id: str, after: int = -1, *, follow: bool = False) -> AsyncGenerator[Trajectory, None]:
        """Trajectories in order of ordinal, from the one after `after`; with `follow` until the job has ended."""
        async with aclosing(self.result_lines(job_id, after, follow=follow)) as lines:
            async for line in lines:
                yield msgspec.json.decode(line, type=Trajectory)

    async def result_lines(self, job_id: str, after: int = -1, *, follow: bool = False) -> AsyncGenerator[bytes, None]:
        """The JSON lines of `results`, as they were recorded.

        Of a running job only what stands before the first unfinished sample is read, so nothing is skipped.
        """
        pause_s, longest_s = POLL_S
        while True:
            status = await self.status(job_id)
            ended = status.status in TERMINAL
            end = status.counts.total if ended else status.complete_through
            before = after
            async with aclosing(self._page(status, after, end)) as page:
                async for ordinal, line in page:
                    yield line
                    after = ordinal
            if after > before:
                pause_s = POLL_S[0]
                continue
            if ended or not follow:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(longest_s, 1.2 * pause_s)

    async def _page(self, status: JobStatus, after: int, end: int) -> AsyncGenerator[tuple[int, bytes], None]:
        if after + 1 >= end:
            return
        request = self._http.stream(
            "GET", f"/v1/jobs/{status.id}/results", params={"after": after, "complete_only": "true"}
        )
        async with reached(self.url, request) as response:
            async for line in byte_lines(response):
                if not line:
                    continue
                place = msgspec.json.decode(line, type=_Place)
                ordinal = place.prompt_index * status.n + place.sample_index
                if ordinal >= end:
                    return
                yield ordinal, line

    # -- everything else

    async def chat(self, model: str, messages: list[dict[str, Any]], **options: Any) -> AsyncIterator[str]:
        """Yields the text of the answer piece by piece."""
        async for event in self.events("/v1/chat/completions", {"model": model, "messages": messages, **options}):
            for choice in event.get("choices", []):
                text = choice.get("delta", {}).get("content")
                if text:
                    yield text

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed request; RequestFailedError also for an error in the middle of the stream."""
        request = self._http.stream("POST", path, json={**body, "stream": True})
        async with reached(self.url, request) as response:
            async for line in byte_lines(response):
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = msgspec.json.decode(data, type=dict[str, Any])
                if "error" in event:
                    raise RequestFailedError(str(event["error"].get("message", data)), response.status_code)
                yield event

    async def generate(self, prompt: str | list[int], **options: Any) -> GeneratedText:
        """One completion of a text or of token ids; options are the fields of `POST /generate`, one prompt, n 1."""
        body = {"prompt" if isinstance(prompt, str) else "prompt_ids": prompt, "logprobs": 1, **options}
        return await self.call("POST", "/generate", GeneratedText, body)

    async def load_adapter(self, adapter_path: str, name: str | None = None) -> AdapterLoaded:
        """Make the next version of an adapter from a directory of the api's host, below its --adapter-dirs."""
        body = {"adapter_path": adapter_path} | ({"name": name} if name else {})
        answer = await self._patiently(lambda: self._http.post("/load_adapter", json=body), busy=frozenset())
        return decode(answer, AdapterLoaded)

    async def upload_adapter(self, folder: Path, fields: dict[str, str]) -> AdapterLoaded:
        """Make the next version of an adapter from a directory of this machine; sent once, never repeated.

        `fields` are those of `POST /upload_adapter`. OSError when a file cannot be read.
        """
        paths = [folder / name for name in ADAPTER_FILES if (folder / name).is_file()]
        with ExitStack() as stack:
            files = [(path.name, (path.name, stack.enter_context(path.open("rb")))) for path in paths]
            try:
                answer = await self._http.post("/upload_adapter", data=fields, files=files)
            except httpx.TransportError as error:
                raise unreachable(self.url, error) from error
        if answer.is_error:
            raise refusal(answer)
        return decode(answer, AdapterLoaded)

    async def adapter_version(self, name: str, version: int = 0) -> AdapterManifest:
        """Manifest of a version; 0 stands for the latest one."""
        if not version:
            latest = (await self.call("GET", f"/v1/adapters/{quote(name, safe='')}", dict[str, Any]))["latest"]
            if not latest:
                raise RequestFailedError(f"adapter {name!r} has no latest version yet: name one, as in {name}@1")
            version = int(latest)
        return await self.call("GET", f"/v1/adapters/{quote(name, safe='')}/versions/{version}", AdapterManifest)

    async def download_adapter(self, manifest: AdapterManifest, file: Path) -> None:
        """Write a version's weights, in mlx-lm's layout; RequestFailedError unless they are what was published."""
        path = f"/v1/adapters/{quote(manifest.name, safe='')}/versions/{manifest.version}/adapters.safetensors"
        digest = hashlib.sha256()
        async with reached(self.url, self._http.stream("GET", path)) as response:
            with file.open("wb") as out:
                async for data in response.aiter_bytes():
                    digest.update(data)
                    out.write(data)
        if digest.hexdigest() != manifest.sha256:
            raise RequestFailedError(f"{manifest.id} came damaged: its sha256 is not the manifest's; ask again")

    async def only_model(self) -> str:
        """The model that is served; RequestFailedError when that is not one."""
        names = [model.id for model in await self.models() if model.is_base]
        if len(names) != 1:
            raise RequestFailedError(f"say which model: {', '.join(names) or 'none'} is served")
        return names[0]

    async def models(self) -> list[ModelInfo]:
        """Models and adapters that a request may name."""
        return (await self.call("GET", "/v1/models", Listing[ModelInfo])).data

    async def health(self) -> dict[str, Any]:
        """The server's report of itself and its workers; also when it answers 503."""
        answer = await self._patiently(lambda: self._http.get("/health"), busy=frozenset(), answers=frozenset({503}))
        return decode(answer, dict[str, Any])

    async def call(self, method: str, path: str, kind: type[T], body: Any = None, **params: Any) -> T:
        """Any other request of the API that is safe to repeat; its answer as `kind`."""
        return decode(await self._patiently(lambda: self._http.request(method, path, params=params, json=body)), kind)

    async def _patiently(
        self,
        send: Callable[[], Awaitable[httpx.Response]],
        busy: frozenset[int] = BUSY,
        answers: frozenset[int] = frozenset(),
    ) -> httpx.Response:
        """Send, and send again while the server is away or busy and our patience lasts. `answers`: errors to return."""
        try:
            response = await patiently(send, Patience(self._patience_s), busy)
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from error
        if response.is_error and response.status_code not in answers:
            raise refusal(response)
        return response


async def poll(
    look: Callable[[], Awaitable[Progress]],
    ended: Collection[str],
    on_progress: Callable[[Progress], None] | None = None,
    timeout_s: float | None = None,
) -> Progress:
    """Look again and again until the status is one of `ended`; TimeoutError after `timeout_s`."""
    pause_s, longest_s = POLL_S
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        seen = await look()
        if on_progress is not None:
            on_progress(seen)
        if seen.status in ended:
            return seen
        if time.monotonic() > until:
            raise TimeoutError(f"{seen.id} is still {seen.status} after {timeout_s:g} s")
        await asyncio.sleep(pause_s)
        pause_s = min(longest_s, 1.2 * pause_s)


class _Place(msgspec.Struct):
    prompt_index: int
    sample_index: int


def _lines(inputs: IO[bytes] | Iterable[JobInput | dict[str, Any]]) -> Iterator[bytes]:
    for item in inputs:
        yield item if isinstance(item, bytes) else msgspec.json.encode(item) + b"\n"
