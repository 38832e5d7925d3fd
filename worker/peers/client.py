"""Gets KV from another worker: one connection, one question, parcels one after another."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.wire import Channel, Connection, PeerError, PeerRefusalError, greet
from worker.engine.prefixes.parcels import KvParcel, UnusableParcelError, unpack
from worker.peers.listening import connected
from worker.peers.messages import KvRequest, Offer, SendParcels


class Transfer:
    """An answer to a question, and what comes of it."""

    def __init__(self, channel: Channel, ask: KvRequest, offer: Offer) -> None:
        self._channel = channel
        self._identity = ask.identity
        self.offer = offer
        self.bytes = 0  # that have come

    async def parcels(self) -> AsyncIterator[KvParcel]:
        """All that was offered, each of them checked. PeerError."""
        await self._channel.say(SendParcels())
        for size in self.offer.sizes:
            data = await self._channel.receive(2 * size + (1 << 20))  # what describes the arrays comes on top
            self.bytes += len(data)
            try:
                yield await asyncio.to_thread(unpack, data, self._identity)
            except UnusableParcelError as error:
                raise PeerError(f"a parcel cannot be used: {error}") from error


@asynccontextmanager
async def asked(host: str, port: int, secret: bytes, ask: KvRequest) -> AsyncIterator[Transfer]:
    """Ask a peer for KV; its offer is valid while the connection lasts. Raises PeerError."""
    connection = Connection(await connected(host, port))
    try:
        channel = await greet(connection, secret)
        await channel.say(ask)
        offer = await channel.hear(Offer)
        if offer.refusal:
            raise PeerRefusalError(offer.refusal[:200])
        if sum(offer.sizes) > ask.most_bytes or any(size < 0 for size in offer.sizes):
            raise PeerError(f"it offers {sum(offer.sizes)} bytes, and {ask.most_bytes} are the limit")
        yield Transfer(channel, ask, offer)
    finally:
        connection.close()
