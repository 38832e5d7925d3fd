"""Gives KV of this worker's prefix cache to other workers of its ring.

Invariants. Who may ask is up to `listening.py`. At most MAX_TRANSFERS are under way, each within TRANSFER_S; a further
peer is refused and computes for itself. What is given away is copied a little between two decode steps
(engine/prefixes/sharing.py), one parcel ahead of the socket at most.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from shared.wire import Channel, PeerError
from worker.engine.prefixes.parcels import Packed
from worker.peers.listening import Listener
from worker.peers.messages import KvRequest, Offer, SendParcels

log = structlog.get_logger()

TRANSFER_S = 60.0
MAX_TRANSFERS = 16


class Store(Protocol):
    """Source of KV for peers. An offer holds its KV until `drop`."""

    async def offer(self, ask: KvRequest) -> tuple[int, Offer]: ...

    async def parcel(self, offer: int, number: int) -> Packed: ...

    def drop(self, offer: int) -> None: ...


class PeerServer:
    """Listens for the other workers of a ring."""

    def __init__(self, store: Store, secret: Callable[[], bytes]) -> None:
        self._store = store
        self._listener = Listener(secret, self._answer, self._fail, answer_s=TRANSFER_S)
        self.transfers = 0  # under way
        self.used_at = time.monotonic()  # when one was last under way
        self.given = self.bytes = self.refused = self.failed = 0

    def listen(self, host: str) -> int:
        """Begin; the port. OSError where this is no address of this machine."""
        return self._listener.listen(host)

    async def close(self) -> None:
        """Stop accepting and close all connections."""
        await self._listener.close()

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
