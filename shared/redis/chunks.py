"""Bytes in Redis as numbered chunks of one hash: adapters, files, gradients, states.

Token frames go through the same server. A chunk is small enough that a frame after it hardly waits (1 MB: 5 ms), and
writer and reader pause between two chunks, so that frames get in between and the append-only file keeps up
(tests/bench/adapter_flight.py measures it). Chunks that no key points to expire after the time that the writer gives.
"""

import asyncio
from collections.abc import AsyncIterator

from redis.asyncio import Redis

from shared.errors import NotFoundError
from shared.redis import keys
from shared.redis.connection.client import ask

CHUNK_BYTES = 2**17
PAUSE_S = 0.001  # between two chunks


class Chunks:
    """The chunks of one key. Writing the same chunk again changes nothing."""

    def __init__(self, redis: Redis, key: str, ttl_s: int = keys.ADAPTER_UPLOAD_TTL_S) -> None:
        self._redis, self._key, self._ttl_s = redis, key, ttl_s

    async def put(self, number: int, chunk: bytes) -> None:
        """Write a chunk, then pause. The key lives for `ttl_s`, or longer where it has a longer time to live."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hset(self._key, mapping={str(number): chunk})
            for rule in ({"nx": True}, {"gt": True}):  # a late writer does not shorten it
                pipe.expire(self._key, self._ttl_s, **rule)
            await pipe.execute()
        await asyncio.sleep(PAUSE_S)

    async def write(self, data: bytes, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Write all of the bytes under a key that no other data has."""
        for number, at in enumerate(range(0, len(data), chunk_bytes)):
            await self.put(number, data[at : at + chunk_bytes])

    async def pieces(self, count: int) -> AsyncIterator[bytes | None]:
        """Chunks 0 to `count`, with a pause between two; None for one that is missing."""
        for number in range(count):
            if number:
                await asyncio.sleep(PAUSE_S)
            yield await ask(self._redis, "HGET", self._key, number)

    async def stored(self) -> AsyncIterator[bytes]:
        """All chunks that were written; NotFoundError when there are none, or when they expire meanwhile."""
        count = int(await ask(self._redis, "HLEN", self._key))
        async for piece in self.pieces(max(count, 1)):
            if piece is None:
                raise NotFoundError("these bytes are gone")
            yield piece

    async def read(self) -> bytes:
        """All of the bytes; NotFoundError as for `stored`."""
        return b"".join([piece async for piece in self.stored()])
