"""Bytes of weights, gradients and states under names of their own.

Their chunks are larger than those of adapters: a train step waits for them, and most of the time went to pauses and
round trips. What no key points to yet, or what was torn, expires after ADAPTER_UPLOAD_TTL_S.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Callable

import msgspec
from redis.asyncio import Redis

from shared.errors import NotFoundError
from shared.redis import keys
from shared.redis.chunks import Chunks
from shared.redis.connection.client import ask

PARCEL_CHUNK_BYTES = 2**20


class StoredParcel(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that lie in Redis."""

    id: str
    size: int
    sha256: bytes


class Parcels:
    """Bytes under names of their own, in one family of keys: `key` says where, by the id."""

    def __init__(self, redis: Redis, key: Callable[[str], str]) -> None:
        self._redis, self._key = redis, key

    async def put(self, data: bytes, lives_s: int = 0) -> StoredParcel:
        """Store bytes for ADAPTER_UPLOAD_TTL_S, or longer."""
        parcel = StoredParcel(secrets.token_hex(8), len(data), await asyncio.to_thread(_sha256, data))
        await Chunks(self._redis, self._key(parcel.id)).write(data, PARCEL_CHUNK_BYTES)
        if lives_s > keys.ADAPTER_UPLOAD_TTL_S:
            await ask(self._redis, "EXPIRE", self._key(parcel.id), lives_s)
        return parcel

    async def get(self, parcel: StoredParcel) -> bytes:
        """The stored bytes; NotFoundError when they have expired or are damaged."""
        data = await Chunks(self._redis, self._key(parcel.id)).read()
        if await asyncio.to_thread(_sha256, data) != parcel.sha256:
            raise NotFoundError("these bytes are not what was stored")
        return data

    async def drop(self, parcel: StoredParcel) -> None:
        """They are not needed any more."""
        await ask(self._redis, "UNLINK", self._key(parcel.id))


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
