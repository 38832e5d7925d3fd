"""A TCP proxy between a worker and Redis that can be cut (connections die, new ones are refused) or held: what is
under way stays under way and arrives late, as from a network that comes back."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self


class Proxy:
    """Listens on a free port of 127.0.0.1 and forwards to `port`."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._cut = False
        self._open: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self._drop()
        self._flowing.set()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cut(self) -> None:
        self._cut = True
        self._drop()

    def hold(self) -> None:
        self._flowing.clear()

    def mend(self) -> None:
        self._cut = False
        self._flowing.set()

    def _drop(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        try:
            there, onward = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, onward}
        pumps = [asyncio.create_task(self._pump(reader, onward)), asyncio.create_task(self._pump(there, writer))]
        self._pumps.update(pumps)
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, onward):
            self._open.discard(end)
            end.transport.abort()
        await asyncio.gather(*pumps, return_exceptions=True)
        self._pumps.difference_update(pumps)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
