"""Fixtures for all layers. Tests that need Redis get a server of their own test process, on a free port.

PARALLM_TEST_REDIS names another server binary, such as a Redis 7.0.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.redis.embedded import EmbeddedRedis


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    other = os.environ.get("PARALLM_TEST_REDIS")
    binary = Path(other) if other else None
    with EmbeddedRedis(tmp_path_factory.mktemp("redis-server"), binary=binary) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> Iterator[str]:
    """A Redis without keys."""
    import redis

    client = redis.Redis.from_url(redis_server.url)
    try:
        client.flushall()
        client.script_flush()
        yield redis_server.url
    finally:
        client.close()
