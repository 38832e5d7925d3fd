"""Redis is killed with SIGKILL in the middle of everything and started again on the same data and port."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from api.serve.embedded_redis import EmbeddedRedis
from shared.redis.connection.client import ask_all, connect
from shared.redis.tokens.reader import FrameReader
from tests.e2e.chaos_proxy import Proxy
from tests.redis.outages import an_idle_worker_wakes, sequences_end_exactly_once, streams_go_on, write_at_once
from tests.waiting import wait_until


class Restartable:
    """A server of this test's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.server = EmbeddedRedis(folder)
        self.url = self.server.start()

    async def safe(self, redis: Redis) -> None:
        write_at_once(self.url)

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        os.kill(self.server.pid, signal.SIGKILL)
        await wait_until(lambda: not self.server.alive)
        self.server.stop()
        yield
        self.server = EmbeddedRedis(self._folder, port=self.server.port)
        await asyncio.to_thread(self.server.start)


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[Restartable]:
    made = Restartable(tmp_path)
    yield made
    made.server.stop()


@pytest.fixture
async def redis(own: Restartable) -> AsyncIterator[Redis]:
    client = connect(own.url)
    yield client
    await client.aclose()


async def test_no_acknowledged_sequence_is_lost(own: Restartable, redis: Redis) -> None:
    await sequences_end_exactly_once(own, redis)


async def test_streams_go_on_without_gap_or_repeat(own: Restartable, redis: Redis) -> None:
    reader = FrameReader(own.url, "a")
    await reader.start()
    await streams_go_on(own, redis, reader, 400)
    await reader.stop()


async def test_an_idle_worker_wakes_after_a_restart(own: Restartable, redis: Redis) -> None:
    await an_idle_worker_wakes(own, redis)


async def test_a_connection_that_breaks_in_its_greeting_is_made_again(redis_url: str) -> None:
    async with Proxy(int(redis_url.rpartition(":")[2].partition("/")[0])) as proxy:
        client, broken = connect(proxy.url), proxy.broken
        proxy.cut()  # it accepts, and closes at once
        asked = asyncio.create_task(ask_all(client, [("PING",)]))
        await wait_until(lambda: proxy.broken > broken + 1 or asked.done())
        assert not asked.done(), asked.exception()
        proxy.mend()
        assert await asked == [True]
        await client.aclose()
