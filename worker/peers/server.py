"""Gives KV of this worker's prefix cache to other workers of its ring.

Invariants. A peer that has not proved within HANDSHAKE_S that it knows the secret is cut off, and has learned nothing.
At most MAX_TRANSFERS are under way, each within TRANSFER_S; a further peer is refused and computes for itself. What is
given away is copied a little between two decode steps (engine/prefixes/sharing.py), one parcel ahead of the socket at
most.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from shared.wire import Channel, Connection, PeerError, admit
from worker.engine.prefixes.parcels import Packed
from worker.peers.messages import KvRequest, Offer, SendParcels

log = structlog.get_logger()

HANDSHAKE_S = 3.0
TRANSFER_S = 60.0
MAX_TRANSFERS = 16
MAX_STRANGERS = 32  # connections without a proof yet


class Store(Protocol):
    """Source of KV for peers. An offer holds its KV until `drop`."""

    async def offer(self, ask: KvRequest) -> tuple[int, Offer]: ...

    async def parcel(self, offer: int, number: int) -> Packed: ...

    def drop(self, offer: int) -> None: ...


class PeerServer:
    """Listens for the other workers of a ring."""

    def __init__(self, store: Store, secret: Callable[[], bytes]) -> None:
        self._store = store
        self._secret = secret
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers = 0
        self.transfers = 0  # under way
        self.used_at = time.monotonic()  # when one was last under way
        self.given = self.bytes = self.refused = self.failed = 0

    def listen(self, host: str) -> int:
        """Begin; the port. OSError where this is no address of this machine."""
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listening = socket.create_server((host, 0), family=family, backlog=64)
        self._listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listening))
        return int(self._listening.getsockname()[1])

    async def close(self) -> None:
        """Stop accepting and close all connections."""
        tasks = [task for task in (self._accepting, *self._tasks) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:  # no descriptors, say
                log.warning("peers.cannot_accept", error=error.strerror or str(error))
                await asyncio.sleep(0.5)
                continue
            if self._strangers >= MAX_STRANGERS or not self._secret():
                sock.close()
                continue
            task = asyncio.create_task(self._serve(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket) -> None:
        peer = _shown(sock)
        connection = Connection(sock)
        try:
            channel = await self._let_in(connection)
            async with asyncio.timeout(TRANSFER_S):
                await self._answer(channel)
        except TimeoutError:
            self._fail(peer, f"not done within {TRANSFER_S:.0f} s")
        except PeerError as error:
            self._fail(peer, str(error))
        except Exception as error:
            log.exception("peers.serving_failed", peer=peer)
            self._fail(peer, type(error).__name__)
        finally:
            connection.close()

    async def _let_in(self, connection: Connection) -> Channel:
        self._strangers += 1
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                return await admit(connection, self._secret())
        except TimeoutError:
            raise PeerError("it did not say who it is") from None
        finally:
            self._strangers -= 1

    async def _answer(self, channel: Channel) -> None:
        ask = await channel.hear(KvRequest)
        if self.transfers >= MAX_TRANSFERS:
            self.refused += 1
            await channel.say(Offer(refusal=f"{self.transfers} transfers are under way"))
            return
        self.transfers += 1
        try:
            number, offer = await self._store.offer(ask)
            try:
                await self._give(channel, number, offer)
            finally:
                self._store.drop(number)
        finally:
            self.transfers -= 1
            self.used_at = time.monotonic()

    async def _give(self, channel: Channel, number: int, offer: Offer) -> None:
        await channel.say(offer)
        if not offer.sizes:
            return
        try:
            await channel.hear(SendParcels)
        except PeerError:  # it would rather compute
            return
        ahead = asyncio.create_task(self._store.parcel(number, 0))
        try:
            for at in range(len(offer.sizes)):
                packed = await ahead
                if at + 1 < len(offer.sizes):
                    ahead = asyncio.create_task(self._store.parcel(number, at + 1))
                await channel.send(packed.head, packed.parts)
                self.bytes += packed.nbytes
        finally:
            ahead.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await ahead
        self.given += 1

    def _fail(self, peer: str, reason: str) -> None:
        self.failed += 1
        log.warning("peers.gave_nothing", peer=peer, reason=reason)


def _shown(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return "?"
