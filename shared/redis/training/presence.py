"""Members of a group that are alive, by their last heartbeat. Times are those of Redis."""

from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import server_time_ms

ALIVE_S = 6  # a member without a heartbeat for this long is dead
_KEPT_S = 60  # after which a name is forgotten


class Presence:
    """Names in one sorted set, by the time of their last heartbeat."""

    def __init__(self, redis: Redis, key: str) -> None:
        self._redis, self._key = redis, key

    async def beat(self, name: str) -> None:
        """Record that this member is alive now."""
        now = await server_time_ms(self._redis, self._key)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zadd(self._key, {name: now})
            pipe.expire(self._key, keys.SHARED_WORDS_TTL_S)
            pipe.zremrangebyscore(self._key, 0, now - 1000 * _KEPT_S)
            await pipe.execute()

    async def gone(self, name: str) -> None:
        """Remove a member that no longer takes part."""
        await self._redis.zrem(self._key, name)

    async def alive(self) -> list[str]:
        """Members that are alive, sorted by name."""
        since = await server_time_ms(self._redis, self._key) - 1000 * ALIVE_S
        return sorted(name.decode() for name in await self._redis.zrangebyscore(self._key, since, "+inf"))
