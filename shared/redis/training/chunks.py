"""Bytes of weights, gradients and states, in chunks.

Chunks are small and there is a pause between two of them, as with those of adapters, so that token frames get in
between. Those of a parcel, which a train step waits for, are larger: most of the time went to pauses and round trips.
What nothing points to yet, or what was torn, is gone after ADAPTER_UPLOAD_TTL_S.
"""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable

import msgspec
from redis.asyncio import Redis

from shared.errors import NotFoundError
from shared.redis import keys
from shared.redis.connection.client import ask

CHUNK_BYTES, PAUSE_S = 2**17, 0.001
PARCEL_CHUNK_BYTES = 2**20


async def put(redis: Redis, key: str, data: bytes, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Write them under a key that is nobody else's; again is the same."""
    for number, at in enumerate(range(0, len(data), chunk_bytes)):
        async with redis.pipeline(transaction=False) as pipe:
            pipe.hset(key, mapping={str(number): data[at : at + chunk_bytes]})
            pipe.expire(key, keys.ADAPTER_UPLOAD_TTL_S)
            await pipe.execute()
        await asyncio.sleep(PAUSE_S)


async def get(redis: Redis, key: str) -> bytes:
    """Read them; NotFoundError when they are gone."""
    return b"".join([piece async for piece in pieces(redis, key)])


async def pieces(redis: Redis, key: str) -> AsyncIterator[bytes]:
    """Read them piece by piece; NotFoundError when they are gone, perhaps in the midst."""
    count = int(await ask(redis, "HLEN", key))
    if not count:
        raise NotFoundError("these bytes are gone")
    for number in range(count):
        piece = await ask(redis, "HGET", key, number)
        if piece is None:
            raise NotFoundError("these bytes are gone")
        yield piece
        await asyncio.sleep(PAUSE_S)


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that lie in Redis."""

    id: str
    size: int
    sha256: bytes


class Parcels:
    """Bytes under names of their own, in one family of keys: `key` says where, by the id."""

    def __init__(self, redis: Redis, key: Callable[[str], str]) -> None:
        self._redis, self._key = redis, key

    async def put(self, data: bytes, lives_s: int = 0) -> Parcel:
        """Store bytes for ADAPTER_UPLOAD_TTL_S, or longer."""
        parcel = Parcel(secrets.token_hex(8), len(data), await asyncio.to_thread(_sha256, data))
        await put(self._redis, self._key(parcel.id), data, PARCEL_CHUNK_BYTES)
        if lives_s > keys.ADAPTER_UPLOAD_TTL_S:
            await ask(self._redis, "EXPIRE", self._key(parcel.id), lives_s)
        return parcel

    async def get(self, parcel: Parcel) -> bytes:
        """What was put; NotFoundError when it is gone or damaged."""
        data = await get(self._redis, self._key(parcel.id))
        if await asyncio.to_thread(_sha256, data) != parcel.sha256:
            raise NotFoundError("these bytes are not what was stored")
        return data

    async def drop(self, parcel: Parcel) -> None:
        """They are not needed any more."""
        await ask(self._redis, "UNLINK", self._key(parcel.id))


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
