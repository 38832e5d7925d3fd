"""A client on a Redis of this test process, and a check that no test leaves a key without owner or end."""

from collections.abc import AsyncIterator, Iterator
from fnmatch import fnmatchcase

import pytest
import redis as sync_redis
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.client import connect
from shared.redis.embedded import EmbeddedRedis


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture(autouse=True)
def no_leaked_keys(redis_url: str, redis_server: EmbeddedRedis) -> Iterator[None]:
    yield
    client = sync_redis.Redis.from_url(redis_server.url)
    try:
        found = [key.decode() for key in client.scan_iter(count=1000)]
        undocumented = [key for key in found if not any(fnmatchcase(key, kind.pattern) for kind in keys.DOCUMENTED)]
        immortal = [key for key in found if client.ttl(key) == -1 and not key.startswith("arq:")]
    finally:
        client.close()
    assert undocumented == [], "keys that shared/redis/keys.py does not document"
    assert immortal == [], "keys without a time to live (arq's queue lives by arq's own rules)"
