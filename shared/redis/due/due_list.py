"""A list of what is due: each entry has a time from which on any process may take it.

To take an entry moves its time into the future: that is the taker's lease. It renews the lease while it works, and a
taker that dies leaves the entry to whoever looks when the lease is over. So an entry has one owner at a time, and is
there until somebody says that it is done.
"""

from collections.abc import Iterable

from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import Script, ask_all

_take = Script("due_take")
_move = Script("due_move")


class DueList:
    """The list under one key."""

    def __init__(self, redis: Redis, key: str) -> None:
        self._redis = redis
        self._key = key

    async def add(self, entry: str, in_ms: int = 0) -> None:
        """Add an entry that is due in so long; one that is there keeps its time."""
        await _move(self._redis, [self._key], ["NX", in_ms, keys.DUE_TTL_S, entry])

    async def take(self, most: int, lease_ms: int) -> list[str]:
        """At most so many of the entries that are due, which nobody else gets while the lease lasts."""
        taken = await _take(self._redis, [self._key], [most, lease_ms, keys.DUE_TTL_S])
        return [entry.decode() for entry in taken]

    async def again(self, entries: Iterable[str], in_ms: int) -> None:
        """These are due in so long from now: a lease that is renewed, or another try. What is done stays done."""
        await _move(self._redis, [self._key], ["XX", in_ms, keys.DUE_TTL_S, *entries])

    async def done(self, entry: str) -> None:
        """Remove an entry."""
        await ask_all(self._redis, [("ZREM", self._key, entry)])
