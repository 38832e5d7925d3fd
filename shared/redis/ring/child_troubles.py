"""Processes of the ring that end again and again: their `mlx_parallm_serve` tells, `/health` shows.

Invariant. What is not told again fades within TTL_S, so nobody's trouble outlives who tells of it.
"""

import time
from collections.abc import Sequence

import msgspec
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import ask

TTL_S = keys.CHILD_TROUBLES_TTL_S


class ChildTrouble(msgspec.Struct, frozen=True):
    """A child process that has ended and is started again after a pause."""

    child: str  # as in "worker 1"
    host: str
    exit_code: int
    times: int  # in a row
    told_ms: int = 0

    @property
    def told(self) -> str:
        """For people."""
        again = f", {self.times} times in a row" if self.times > 1 else ""
        return f"{self.child} on {self.host} has ended with exit code {self.exit_code}{again}; it is started again"


class ChildTroubles:
    """All of a ring's."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def tell(self, teller: str, troubles: Sequence[ChildTrouble]) -> None:
        """What ails the children of `teller`, instead of what it told last."""
        key, now = keys.child_troubles(), time.time_ns() // 1_000_000
        stamped = [msgspec.structs.replace(each, told_ms=now) for each in troubles]
        async with self._redis.pipeline() as pipe:
            if stamped:
                pipe.hset(key, teller, msgspec.json.encode(stamped).decode())
            else:
                pipe.hdel(key, teller)
            pipe.expire(key, TTL_S)
            await pipe.execute()

    async def read(self) -> list[ChildTrouble]:
        """What was told of late."""
        oldest = time.time_ns() // 1_000_000 - 1000 * TTL_S
        told: dict[bytes, bytes] = await ask(self._redis, "HGETALL", keys.child_troubles())
        found = [each for data in told.values() for each in msgspec.json.decode(data, type=list[ChildTrouble])]
        return sorted((each for each in found if each.told_ms > oldest), key=lambda each: (each.host, each.child))
