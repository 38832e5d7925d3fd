"""Answers that many processes ask Redis for again and again, and only one of them has to: the others take what it has
seen.

What is seen is kept compressed: heartbeats are much alike, and each process of a large ring fetches all of them each
second (645 KB of a thousand workers, 75 KB compressed).
"""

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import msgspec
from redis.asyncio import Redis

from shared.redis import keys

Seen = TypeVar("Seen")
FRESH_MS = 1000  # how long one look serves
TURN_MS = 900  # that the others wait for it, with what they know
ASKS = 6  # meanwhile, of who knows nothing
TURNS = 3  # of others, that it waits for: they may be slow
FASTEST = 1  # of zlib's levels
MOST_BYTES = 64 << 20  # of what was seen


class SharedLook(Generic[Seen]):
    """One kind of look, for each model."""

    def __init__(self, redis: "Redis", key: Callable[[str], str], type_: type[Seen]) -> None:
        self._redis, self._key, self._type = redis, key, type_
        self._known: dict[str, Seen] = {}  # of each model, the latest

    async def at(self, model: str, look: Callable[[], Awaitable[Seen]]) -> Seen:
        """The result of a look that is at most FRESH_MS old; while another process looks, this process's last one,
        little older.

        Who knows nothing waits for it, but not for ever: many processes that start at once would all look.
        """
        key = self._key(model)
        turn = keys.live_turn(model, key.rpartition(":")[2])
        until = time.monotonic() + TURNS * TURN_MS / 1000
        while (kept := await self._redis.get(key)) is None:
            known = self._known.pop(model, None)  # it serves once: a caller without a result twice in a row waits
            if await self._redis.set(turn, b"", nx=True, px=TURN_MS) or time.monotonic() > until:
                seen = self._known[model] = await look()
                await self._redis.set(key, zlib.compress(msgspec.msgpack.encode(seen), FASTEST), px=FRESH_MS)
                return seen
            if known is not None:
                return known
            await asyncio.sleep(TURN_MS / 1000 / ASKS)
        try:
            plain = zlib.decompressobj().decompress(kept, MOST_BYTES)
            seen = self._known[model] = msgspec.msgpack.decode(plain, type=self._type)
        except (zlib.error, msgspec.DecodeError, ValueError):
            return await look()  # another version's; it goes soon
        return seen
