"""A stream over bare ASGI: bytes as they come, closed when the client goes, ended properly at shutdown."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.types import Message

from api.callers.caller import until_disconnected
from api.http.sse import EventStream
from tests.waiting import HANG_S, wait_until

SCOPE = {"type": "http", "path": "/v1/completions"}


class Connection:
    """A client's side of one ASGI call."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class Source:
    """Events that can be held back; knows whether it was closed."""

    def __init__(self, count: int, hold: bool = False) -> None:
        self.closed = False
        self._count, self._hold = count, hold

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            for i in range(self._count):
                yield b"data: %d\n\n" % i
            if self._hold:
                await asyncio.Event().wait()
        finally:
            self.closed = True


async def test_events_go_out_one_by_one_and_the_response_ends() -> None:
    connection, source = Connection(), Source(3)
    await EventStream(source.events())(SCOPE, connection.receive, connection.send)
    start, *bodies, last = connection.sent
    assert dict(start["headers"])[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in dict(start["headers"])
    assert [message["body"] for message in bodies] == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n"]
    assert not last.get("more_body")
    assert source.closed


async def test_a_client_that_leaves_closes_the_source_at_once() -> None:
    connection, source = Connection(), Source(1, hold=True)
    call = asyncio.create_task(EventStream(source.events())(SCOPE, connection.receive, connection.send))
    await wait_until(lambda: len(connection.sent) == 2)
    connection.gone.set()
    await asyncio.wait_for(call, HANG_S)
    assert source.closed


async def test_a_stream_cut_off_at_shutdown_still_says_done() -> None:
    connection, source = Connection(), Source(1, hold=True)
    call = asyncio.create_task(EventStream(source.events())(SCOPE, connection.receive, connection.send))
    await wait_until(lambda: len(connection.sent) == 2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert b"shutting down" in connection.body
    assert connection.body.endswith(b"data: [DONE]\n\n")
    assert source.closed


async def test_work_is_cancelled_when_the_client_leaves_first() -> None:
    connection = Connection()
    connection.gone.set()
    assert await until_disconnected(asyncio.Event().wait(), connection.receive) is None


async def test_the_result_of_work_and_its_errors_come_through() -> None:
    async def work(result: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    connection = Connection()
    assert await until_disconnected(work(5), connection.receive) == 5
    with pytest.raises(ValueError, match="broken"):
        await until_disconnected(work(ValueError("broken")), connection.receive)


async def test_a_lost_cancellation_is_repeated() -> None:
    """redis-py turns a cancellation into a timeout of its own when the two meet."""
    lost = 0

    async def stubborn() -> None:
        nonlocal lost
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            lost += 1
        await asyncio.Event().wait()

    connection = Connection()
    connection.gone.set()
    assert await asyncio.wait_for(until_disconnected(stubborn(), connection.receive), HANG_S) is None
    assert lost == 1
