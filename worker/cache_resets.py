"""Orders to forget cached KV: carried out between two steps of the engine, and answered in Redis when that is done."""

import asyncio
import contextlib

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.redis import keys
from worker.engine.orders import ClearCache
from worker.engine.thread import EngineThread

log = structlog.get_logger()


class CacheResets:
    """Passes resets of the prefix cache to one worker's engine and publishes their answers."""

    def __init__(self, redis: Redis, engine: EngineThread, worker_id: str) -> None:
        self._redis = redis
        self._engine = engine
        self._worker_id = worker_id
        self._answering: set[asyncio.Task[None]] = set()

    def take(self, order: str, rows: bool) -> None:
        """Begin; an order that comes again is carried out again."""
        loop = asyncio.get_running_loop()

        def done() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: we are stopping
                loop.call_soon_threadsafe(self._answer, order)

        log.info("worker.cache_reset", order=order, rows=rows)
        self._engine.send(ClearCache(rows), done)

    def _answer(self, order: str) -> None:
        task = asyncio.create_task(self._publish(order))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _publish(self, order: str) -> None:
        with contextlib.suppress(RedisError, OSError):  # it will be asked again
            await self._redis.set(keys.answer(f"{order}-{self._worker_id}"), b"1", ex=keys.ANSWER_TTL_S)
