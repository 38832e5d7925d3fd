"""One message under one key, with a time to live."""

from typing import Generic, TypeVar

import msgspec
from redis.asyncio import Redis

T = TypeVar("T", bound=msgspec.Struct)


class StoredMessage(Generic[T]):
    """Messages of one kind, each under a key of its own."""

    def __init__(self, redis: Redis, kind: type[T], ttl_s: int, *, packed: bool = False, renews: bool = False) -> None:
        """`packed`: as msgpack in place of JSON; `renews`: finding a message renews its time to live."""
        self._redis, self._ttl_s, self._renews = redis, ttl_s, renews
        module = msgspec.msgpack if packed else msgspec.json
        self._encode, self._decode = module.Encoder().encode, module.Decoder(kind).decode

    async def put(self, key: str, message: T, *, new: bool = False) -> bool:
        """Write a message; with `new` only where there is none, and False where there is one."""
        return bool(await self._redis.set(key, self._encode(message), ex=self._ttl_s, nx=new))

    async def find(self, key: str) -> T | None:
        """The message, or None; msgspec.DecodeError when another version has written it."""
        raw = await (self._redis.getex(key, self._ttl_s) if self._renews else self._redis.get(key))
        return None if raw is None else self._decode(raw)

    async def forget(self, key: str) -> None:
        """Delete the message, if there is one."""
        await self._redis.delete(key)
