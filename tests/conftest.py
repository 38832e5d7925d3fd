"""Fixtures for all layers. Tests that need Redis get a server of their own test process, on a free port.

PARALLM_TEST_REDIS names another server binary, such as a Redis 7.0.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from shared.redis.embedded import EmbeddedRedis


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A test that starts a command in this process sets up logs for those after it: undo that."""
    before, root = structlog.get_config(), logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    if structlog.get_config() != before:
        structlog.configure(**before)
        root.handlers[:] = handlers
        root.setLevel(level)


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
