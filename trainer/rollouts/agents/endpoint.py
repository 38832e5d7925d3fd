"""The endpoint that an agent takes for its model: OpenAI's chat completions, on a free port of this machine.

It generates nothing. Each request waits here until the trainer has sampled its answer through the ring's queue, token
by token as all rollouts are. A request belongs to the run whose key it comes with, as `Authorization: Bearer KEY` or in
its path (`/KEY/v1/...`), so an agent needs no more than its usual `base_url` and API key. Sampling parameters of
requests have no effect: the run's own decide.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import uvicorn

from shared.jobs import Message

LARGEST = 1 << 24  # bytes of a request
_Scope = Mapping[str, Any]
_Io = Callable[..., Any]


@dataclass(frozen=True)
class ChatCall:
    """A chat that an agent wants the next message of."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    answer: "asyncio.Future[Message]"  # to be set; an exception becomes an error of the endpoint


@dataclass(frozen=True)
class Feedback:
    """The agent's own verdict on its episode."""

    reward: float
    components: dict[str, float]
    errors: str = ""  # what the program has written to standard error, the end of it


class EpisodeOverError(Exception):
    """The episode takes no more turns; the message is for the agent."""


Sink = Callable[[ChatCall | Feedback], None]


class ModelEndpoint:
    """One HTTP server for all runs of a process; belongs to its event loop."""

    def __init__(self) -> None:
        self._sinks: dict[str, Sink] = {}
        self._opening: asyncio.Task[str] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._server: uvicorn.Server | None = None

    async def url(self) -> str:
        """Address without a path; the server starts with the first call."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    @contextlib.contextmanager
    def takes(self, key: str, sink: Sink) -> Iterator[None]:
        """Hand what comes with this key to `sink`."""
        self._sinks[key] = sink
        try:
            yield
        finally:
            del self._sinks[key]

    async def close(self) -> None:
        """End the server; requests that wait are cut off."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving

    async def _open(self) -> str:
        config = uvicorn.Config(
            self._app, "127.0.0.1", 0, log_level="warning", lifespan="off", access_log=False, interface="asgi3"
        )
        self._server = server = _Server(config)
        self._serving = asyncio.create_task(server.serve())
        while not server.started:
            if self._serving.done():
                await self._serving
                raise OSError("no port for the agents' endpoint")
            await asyncio.sleep(0.01)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    async def _app(self, scope: _Scope, receive: _Io, send: _Io) -> None:
        if scope["type"] != "http":
            return
        try:
            status, body, streams = await self._answered(scope, receive)
        except _RefusedError as refused:
            status, body, streams = refused.status, {"error": {"message": str(refused), "type": refused.kind}}, False
        data = _as_stream(body) if streams else json.dumps(body).encode()
        kind = b"text/event-stream" if streams else b"application/json"
        headers = [(b"content-type", kind), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def _answered(self, scope: _Scope, receive: _Io) -> tuple[int, dict[str, Any], bool]:
        key, path = _place(scope)
        sink = self._sinks.get(key)
        if sink is None:
            raise _RefusedError(401, "this key belongs to no episode under way", "authentication_error")
        if scope["method"] == "GET" and path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0}]}, False
        if scope["method"] != "POST" or path not in ("/v1/chat/completions", "/v1/feedback"):
            raise _RefusedError(404, f"episodes know POST /v1/chat/completions and /v1/feedback, not {path}")
        body = await _json(receive)
        if path == "/v1/feedback":
            sink(_feedback(body))
            return 200, {}, False
        messages, tools = body.get("messages"), body.get("tools") or []
        if not _are_messages(messages) or not messages or not _are_messages(tools):
            raise _RefusedError(400, "'messages' is a list of messages, 'tools' one of tools")
        if body.get("n") not in (None, 1):
            raise _RefusedError(400, "an episode has one answer to a request: 'n' is 1")
        call = ChatCall(tuple(map(_plain, messages)), tuple(tools), asyncio.get_running_loop().create_future())
        sink(call)
        try:
            message = await call.answer
        except asyncio.CancelledError:
            call.answer.cancel()
            raise
        except EpisodeOverError as over:
            raise _RefusedError(400, str(over), "episode_over") from over
        return 200, _completion(message, str(body.get("model") or "policy")), bool(body.get("stream"))


class _Server(uvicorn.Server):
    """A server that leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _RefusedError(Exception):
    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


def _place(scope: _Scope) -> tuple[str, str]:
    """Key and path of a request."""
    head, _, rest = scope["path"].lstrip("/").partition("/")
    if head != "v1":
        return head, "/" + rest
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    return headers.get("authorization", "").removeprefix("Bearer ").strip(), scope["path"]


async def _json(receive: _Io) -> dict[str, Any]:
    data, more = b"", True
    while more:
        part = await receive()
        if part["type"] == "http.disconnect":
            raise _RefusedError(400, "the request was cut off")
        data, more = data + part.get("body", b""), part.get("more_body", False)
        if len(data) > LARGEST:
            raise _RefusedError(413, f"a request has at most {LARGEST} bytes")
    try:
        body = json.loads(data)
    except ValueError as error:
        raise _RefusedError(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise _RefusedError(400, "the body is no JSON object")
    return body


def _are_messages(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(each, dict) for each in given)


def _plain(message: Message) -> Message:
    """A message whose content is text, as chat templates take it."""
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or not isinstance(part.get("text"), str) for part in content):
            raise _RefusedError(400, "parts of an episode's messages are text")
        message = message | {"content": "".join(part["text"] for part in content)}
    return {name: value for name, value in message.items() if value is not None}


def _feedback(body: dict[str, Any]) -> Feedback:
    reward, components = body.get("reward"), body.get("components") or {}
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not isinstance(components, dict):
        raise _RefusedError(400, "feedback is {'reward': a number, 'components': numbers by name}")
    try:
        return Feedback(float(reward), {str(name): float(value) for name, value in components.items()})
    except (TypeError, ValueError) as error:
        raise _RefusedError(400, f"components of feedback are numbers: {error}") from error


def _completion(message: Message, model: str) -> dict[str, Any]:
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    now = time.time_ns()
    return {
        "id": f"chatcmpl-{now:x}",
        "object": "chat.completion",
        "created": now // 10**9,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
    }


def _as_stream(body: dict[str, Any]) -> bytes:
    """The completion as one chunk of a stream."""
    (choice,) = body["choices"]
    message = choice["message"]
    calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls") or ())]
    delta = message | ({"tool_calls": calls} if calls else {})
    chunk = body | {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    last = body | {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}],
    }
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in (chunk, last)) + b"data: [DONE]\n\n"
