"""The api under uvicorn in the test's own event loop, so that connections are real."""

import asyncio
import contextlib
import json
import math
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.routing import BaseRoute

from api.app import create_app
from api.http.api_keys import line_of, new_key
from api.http.connections import bounded
from api.ring.ring import Ring
from shared.process.api_settings import ApiSettings
from tests.waiting import HANG_S, comes_true

_routes: list[BaseRoute] = []


def _with_known_routes(app: FastAPI) -> FastAPI:
    """FastAPI builds what it knows of each route when an app is first asked, a fifth of a second for all of ours.

    It depends on nothing of one app, so all apps of this test process have the routes of the first one.
    """
    _routes.extend(app.router.routes if not _routes else ())
    app.router.routes[:] = _routes
    return app


def key_file(folder: Path, **fields: dict[str, str]) -> tuple[Path, dict[str, dict[str, str]]]:
    """A file with a key for each name, with these fields, and by name the header that sends the key."""
    secrets = {name: new_key() for name in fields}
    file = folder / "keys"
    file.write_text("".join(f"{line_of(secrets[name], name=name, **own)}\n" for name, own in fields.items()))
    return file, {name: {"authorization": f"Bearer {secret}"} for name, secret in secrets.items()}


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """As uvicorn's, which looks every 0.1 s whether it is to end."""
        await comes_true(lambda: self.on_tick(0), math.inf)


class Api:
    """A running api process."""

    def __init__(self, url: str, ring: Ring, http: httpx.AsyncClient) -> None:
        self.url = url
        self.ring = ring
        self.http = http

    async def post(self, path: str, body: Any, **arguments: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **arguments)

    @contextlib.asynccontextmanager
    async def stream(self, path: str, body: Any) -> AsyncIterator["Events"]:
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            yield Events(response)

    @contextlib.asynccontextmanager
    async def resume(self, request_id: str, last_event_id: str) -> AsyncIterator["Events"]:
        headers = {"Last-Event-ID": last_event_id}
        async with self.http.stream("GET", f"/v1/streams/{request_id}", headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            yield Events(response)


class Events:
    """Server-sent events as a client reads them."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.last_event_id = ""
        self.chunks: list[dict[str, Any]] = []
        self.done = False
        self._lines = response.aiter_lines()

    async def next(self) -> dict[str, Any] | None:
        """The next chunk; None after [DONE]."""
        pending = self.last_event_id
        async for line in self._lines:
            if line.startswith("id: "):
                pending = line[4:]
            elif line == "data: [DONE]":
                self.done = True
            elif line.startswith("data: "):
                self.last_event_id = pending
                self.chunks.append(json.loads(line[6:]))
                return self.chunks[-1]
        return None

    async def all(self) -> list[dict[str, Any]]:
        """Read to the end."""
        while await self.next() is not None:
            pass
        return self.chunks


@contextlib.asynccontextmanager
async def api(redis_url: str, *, send_buffer: int = 0, **settings: Any) -> AsyncIterator[Api]:
    """One api process in the ring of `redis_url`; `send_buffer` bounds what the kernel holds for each client."""
    parsed = ApiSettings(redis=redis_url, **settings)
    app = _with_known_routes(create_app(parsed))
    config = uvicorn.Config(app, http=bounded(parsed.slow_reader_s), lifespan="on", log_config=None, access_log=False)
    server = _Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if send_buffer:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started:
                assert not serving.done(), serving.exception()
                await asyncio.sleep(0.005)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=HANG_S, trust_env=False, verify=False) as http:
                yield Api(url, app.state.ring, http)
        finally:
            server.should_exit = True
            await serving
