"""A TCP proxy between a worker and Redis that can be cut (connections die, new ones are refused) or held: what is
under way stays under way and arrives late, as from a network that comes back.

In front of a cluster it has a port for each server, and writes them over the servers' own where these tell of one
another."""

import asyncio
import contextlib
import functools
from types import TracebackType
from typing import Self


class Proxy:
    """Listens on a free port of 127.0.0.1 for each of `ports`, which it forwards to; several are a cluster's."""

    def __init__(self, *ports: int) -> None:
        self._targets = ports
        self._ours: dict[int, int] = {}  # by the server's own
        self._servers: list[asyncio.Server] = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._cut = False
        self.broken = 0  # connections that came while it was cut
        self._open: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        for target in self._targets:
            server = await asyncio.start_server(functools.partial(self._accept, target), "127.0.0.1", 0)
            self._servers.append(server)
            self._ours[target] = server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.close()
        self._drop()
        self._flowing.set()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{port}" for port in self._ours.values())
        return f"redis+cluster://{places}" if len(self._ours) > 1 else f"redis://{places}/0"

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

    async def _accept(self, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            self.broken += 1
            writer.transport.abort()
            return
        try:
            there, onward = await asyncio.open_connection("127.0.0.1", target)
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
                writer.write(self._told(data) if len(self._ours) > 1 else data)
                await writer.drain()

    def _told(self, data: bytes) -> bytes:
        """With our ports for the servers' (CLUSTER SLOTS and MOVED end with one); a torn one only goes past us."""
        for theirs, ours in self._ours.items():
            data = data.replace(b":%d\r\n" % theirs, b":%d\r\n" % ours)
        return data
