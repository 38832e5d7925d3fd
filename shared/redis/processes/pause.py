"""The switch that stops all workers: POST /pause sets it, /resume takes it back.

Invariants. The key is the truth: workers read it before they claim anything, with every heartbeat and after every
(re)connection; the message to their control channels only makes it quick. A worker that starts later obeys, too. A
worker tells in its heartbeat under which pause it has come to rest.
"""

import time
import uuid
from typing import Literal

import msgspec
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import members
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.redis.stored import StoredMessage

PauseMode = Literal["abort", "wait", "keep"]


class PauseOrder(msgspec.Struct, frozen=True):
    """One pause. abort: rows end; wait: rows finish first; keep: rows stand still and go on later."""

    id: str
    mode: PauseMode
    clear_cache: bool  # no KV from before the pause is used after it
    at_ms: int = 0


class PauseSwitch:
    """The pause switch of one ring, for all models."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._registry = WorkerRegistry(redis)
        self._order = StoredMessage(redis, PauseOrder, keys.PAUSE_TTL_S, renews=True)

    async def current(self) -> PauseOrder | None:
        """The pause in force; reading it renews its time to live."""
        return await self._order.find(keys.pause())

    async def set(self, mode: PauseMode, *, clear_cache: bool) -> PauseOrder:
        """Put a pause in force; it replaces an earlier one."""
        order = PauseOrder(uuid.uuid4().hex[:12], mode, clear_cache, time.time_ns() // 1_000_000)
        await self._order.put(keys.pause(), order)
        await self._notify()
        return order

    async def clear(self) -> None:
        """End the pause, so that workers continue."""
        await self._order.forget(keys.pause())
        await self._notify()

    async def restless(self, order: PauseOrder | None) -> list[str]:
        """Ids of live workers that do not rest under `order` yet; without an order, of the ones that still rest."""
        wanted = "" if order is None else order.id
        models = await members(self._redis, keys.models())
        workers = [worker for model in models for worker in await self._registry.workers(model)]
        return [worker.id for worker in workers if worker.pause != wanted and worker.state not in ("draining", "stuck")]

    async def _notify(self) -> None:
        message = msgspec.msgpack.encode(("pause",))
        for model in await members(self._redis, keys.models()):
            for worker in await members(self._redis, keys.workers(model)):
                await self._redis.publish(keys.control_channel(worker), message)
