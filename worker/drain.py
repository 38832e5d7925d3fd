"""How a worker leaves: its rows finish within a grace time, the rest goes back to the queue at once.

Invariants. Nothing is claimed any more when this begins. What is handed back has all its tokens in the log, so that it
goes on elsewhere behind the last one. Without Redis nothing waits: leases run out by themselves.
"""

import asyncio
import contextlib
from collections.abc import Callable

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.redis.connection.faults import reason
from shared.redis.queue.sequence_queue import SequenceQueue
from worker.claims import Running
from worker.publisher import TokenPublisher

log = structlog.get_logger()

LAST_WORDS_S = 3.0  # for each of them, to a Redis that may be away


class Farewell:
    """The end of one worker."""

    def __init__(
        self,
        redis: Redis,
        queue: SequenceQueue,
        publisher: TokenPublisher,
        worker_id: str,
        running: dict[str, Running],
        freed: asyncio.Event,
    ) -> None:
        self._redis = redis
        self._queue = queue
        self._publisher = publisher
        self._worker_id = worker_id
        self._running = running
        self._freed = freed

    async def finish_rows(self, grace_s: float, hopeless: Callable[[], bool]) -> None:
        """Wait until every row has ended and is committed; not when nobody can be told, or nothing computes them."""
        log.info("worker.draining", rows=len(self._running), grace_s=grace_s)
        looking = asyncio.create_task(self._redis_gone())
        try:
            async with asyncio.timeout(grace_s):
                while self._running and not hopeless() and not looking.done():
                    self._freed.clear()
                    freed = asyncio.create_task(self._freed.wait())
                    await asyncio.wait({freed, looking}, return_when=asyncio.FIRST_COMPLETED)
                    freed.cancel()
        except TimeoutError:
            log.info("worker.grace_over", rows=len(self._running))
        finally:
            looking.cancel()

    async def _redis_gone(self) -> None:
        """Return when Redis does not answer."""
        while True:
            try:
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._redis.ping()
            except (RedisError, OSError) as error:  # TimeoutError is an OSError
                log.warning("worker.redis_trouble", loop="drain", error=reason(error), rows=len(self._running))
                return
            await asyncio.sleep(LAST_WORDS_S / 3)

    async def hand_back(self, *, failed: bool) -> None:
        """Give what is left to the others at once; `failed`: the engine has, over these rows."""
        rows = [row for row in self._running.values() if row.occupies_row]
        for row in rows:
            self._publisher.flush_log(row.id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._publisher.drained()
        for row in rows:
            row.occupies_row = False
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                if rows:
                    await self._queue.release(self._worker_id, [row.claim for row in rows], failed=failed)
                    log.info("worker.handed_back", sequences=len(rows))
                await self._queue.delete_worker_streams(self._worker_id)
        except (RedisError, OSError) as error:
            log.warning("worker.redis_trouble", loop="hand_back", error=reason(error), sequences=len(rows))
