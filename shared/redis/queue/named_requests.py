"""Requests by the names that their clients gave them, while they run: what POST /abort_requests finds them by.

Invariants. A name belongs to one owner, and may be given to several requests. A note goes with its request; one that a
dead api process has left goes with its time to live.
"""

import msgspec
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import ask


class NamedRequests:
    """The notes of all owners."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def add(self, owner: str, name: str, model: str, request: str) -> None:
        """Note that a request begins; may be repeated."""
        key = keys.named_requests(owner, name)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.sadd(key, _entry(model, request))
            pipe.expire(key, keys.REQUEST_TTL_S)
            await pipe.execute()

    async def remove(self, owner: str, name: str, model: str, request: str) -> None:
        """Remove the note of a request that has ended."""
        await ask(self._redis, "SREM", keys.named_requests(owner, name), _entry(model, request))

    async def find(self, owner: str, name: str) -> list[tuple[str, str]]:
        """(model, id) of the requests of this name."""
        entries = await ask(self._redis, "SMEMBERS", keys.named_requests(owner, name))
        return sorted(msgspec.msgpack.decode(entry, type=tuple[str, str]) for entry in entries)


def _entry(model: str, request: str) -> bytes:
    return msgspec.msgpack.encode((model, request))
