"""Processes of the ring that end again and again, or cannot begin yet, as while a model is downloaded.

Their `mlx_parallm_serve` reports the former, a worker the latter; `/health` shows them.

Invariant. A report that is not repeated expires after TTL_S, so no trouble outlives the process that reports it.
"""

import time
from collections.abc import Sequence

import msgspec
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import ask

TTL_S = keys.CHILD_TROUBLES_TTL_S


class ChildTrouble(msgspec.Struct, frozen=True):
    """A process that has ended and is started again after a pause, or that has not begun yet."""

    child: str  # as in "worker 1"
    host: str
    exit_code: int
    times: int  # in a row
    told_ms: int = 0
    note: str = ""  # what it does instead of its work, where it has not ended at all

    @property
    def message(self) -> str:
        """Message shown to the operator."""
        if self.note:
            return self.note
        again = f", {self.times} times in a row" if self.times > 1 else ""
        return f"{self.child} on {self.host} has ended with exit code {self.exit_code}{again}; it is started again"


class ChildTroubles:
    """The troubles of all child processes of a ring."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def report(self, teller: str, troubles: Sequence[ChildTrouble]) -> None:
        """Replace the troubles that `teller` has reported."""
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
        """The troubles that were reported within TTL_S."""
        oldest = time.time_ns() // 1_000_000 - 1000 * TTL_S
        notes: dict[bytes, bytes] = await ask(self._redis, "HGETALL", keys.child_troubles())
        troubles = [each for data in notes.values() for each in msgspec.json.decode(data, type=list[ChildTrouble])]
        return sorted((each for each in troubles if each.told_ms > oldest), key=lambda each: (each.host, each.child))
