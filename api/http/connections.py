"""Connections that a client cannot hold for nothing: bounds on slow readers, slow senders and endless headers.

A response is written into the transport's buffer, 64 KiB at most; then the writer waits, and what its stream would say
meanwhile stays in Redis (shared/redis/tokens/feed.py). A client that leaves that buffer full for `slow_reader_s` is cut
off, so nothing is held for it for longer. Bodies have a time limit of their own (api/http/limits.py).
"""

import asyncio
from http import HTTPStatus

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.http.errors import error_object
from shared.errors import HeadersTooLargeError

log = structlog.get_logger()

HEADERS_WITHIN_S = 20.0  # from the connection's first byte, or the first byte of a further request
MAX_HEADER_BYTES = 64 << 10


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with the bounds; `bounded` makes one with other limits."""

    slow_reader_s = 30.0

    _cut: asyncio.TimerHandle | None = None
    _overdue: asyncio.TimerHandle | None = None
    _header_bytes = 0  # received, of headers that have not ended
    _block_bytes = 0  # of a request's line and headers, or of a body's trailers, as far as they have been read
    _in_headers = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come; it must say what it wants."""
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._cut, self._overdue):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES + len(data):  # this block may end them
                self._abort("headers without end")
                return
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """To what is no HTTP, or has too many headers."""
        if self._block_bytes <= MAX_HEADER_BYTES:
            super().send_400_response(msg)
            return
        status = f"HTTP/1.1 431 {HTTPStatus(431).phrase}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        body = error_object(HeadersTooLargeError(f"a request's headers are at most {MAX_HEADER_BYTES} bytes"))
        self.transport.write(f"{status}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def on_url(self, url: bytes) -> None:
        """The request's address, or a part of it."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        """An exception ends the parser, upon which `send_400_response` is called."""
        self._block_bytes += size
        if self._block_bytes > MAX_HEADER_BYTES:
            raise OverflowError

    def on_message_begin(self) -> None:
        self._block_bytes = 0
        super().on_message_begin()
        if self._overdue is None:
            self._expect_headers()

    def on_headers_complete(self) -> None:
        self._in_headers, self._header_bytes, self._block_bytes = False, 0, 0
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """The client does not read as fast as we write."""
        super().pause_writing()
        self._cut = self.loop.call_later(self.slow_reader_s, self._abort, "it does not read")

    def resume_writing(self) -> None:
        """The client has read enough: it is no longer timed."""
        if self._cut is not None:
            self._cut.cancel()
            self._cut = None
        super().resume_writing()

    def _expect_headers(self) -> None:
        self._in_headers = True
        self._overdue = self.loop.call_later(HEADERS_WITHIN_S, self._abort, "it sends no request")

    def _abort(self, reason: str) -> None:
        log.info("api.connection_cut", reason=reason, client=self.client and self.client[0])
        self.transport.abort()


def bounded(slow_reader_s: float) -> type[BoundedProtocol]:
    """The protocol with this bound."""
    return type("Protocol", (BoundedProtocol,), {"slow_reader_s": slow_reader_s})
