"""An api for batches, which looks often and keeps leases short."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from shared.redis.processes.worker_registry import WorkerRegistry
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import CARD
from tests.unit.api_texts import bundle


@pytest.fixture(autouse=True)
def in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks every 0.1 s instead of every second, and leases of 1 s instead of 4."""
    monkeypatch.setattr("api.batches.work.LOOK_S", 0.1)
    monkeypatch.setattr("shared.redis.keys.BATCH_LEASE_MS", 1000)
    monkeypatch.setattr("api.batches.work.BATCH_LEASE_MS", 1000)


@pytest.fixture
async def server(redis_url: str, redis: Redis) -> AsyncIterator[Api]:
    """An api in a ring that knows a model and has no live worker: batches wait to be validated."""
    await WorkerRegistry(redis).register_model(CARD, bundle())
    async with api(redis_url) as serving:
        yield serving
