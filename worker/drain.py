"""How a worker leaves: its rows finish within a grace time, the rest goes back to the queue at once.

Invariants. Nothing is claimed any more when this begins. What is handed back has all its tokens in the log, so that it
goes on elsewhere after the last one. Without Redis nothing waits: leases run out by themselves.
"""

import asyncio
from collections.abc import Callable

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.redis.connection.faults import reason
from shared.redis.queue.sequence_queue import SequenceQueue
from worker.claims import LAST_WORDS_S, SET_ASIDE_S, Returns
from worker.peers.exchange import KvExchange
from worker.rows import ClaimedRow, ClaimedRows

log = structlog.get_logger()


class Farewell:
    """The end of one worker."""

    def __init__(
        self,
        redis: Redis,
        queue: SequenceQueue,
        worker_id: str,
        returns: Returns,
        rows: ClaimedRows,
        peers: KvExchange,
    ) -> None:
        self._peers = peers
        self._redis = redis
        self._queue = queue
        self._worker_id = worker_id
        self._returns = returns
        self._rows = rows

    async def hand_back_batch(self) -> None:
        """Give batch rows to the others, or to this model's next worker, at once: nobody waits for their next token."""
        rows = [row for row in self._rows.occupying() if row.claim.spec.sequence_class == "batch"]
        if rows:
            await self._hand_back(rows, failed=False)

    async def finish_rows(self, grace_s: float, hopeless: Callable[[], bool]) -> None:
        """Wait until every row has ended and is committed; not when Redis is away, or nothing computes them."""
        log.info("worker.draining", rows=len(self._rows), grace_s=grace_s)
        looking = asyncio.create_task(self._redis_gone())
        try:
            async with asyncio.timeout(grace_s):
                while self._rows and not hopeless() and not looking.done():
                    self._rows.changed.clear()
                    freed = asyncio.create_task(self._rows.changed.wait())
                    await asyncio.wait({freed, looking}, return_when=asyncio.FIRST_COMPLETED)
                    freed.cancel()
        except TimeoutError:
            log.info("worker.grace_over", rows=len(self._rows))
        finally:
            looking.cancel()

    async def _redis_gone(self) -> None:
        """Return when Redis does not answer."""
        while True:
            try:
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._redis.ping()
            except (RedisError, OSError) as error:  # TimeoutError is an OSError
                log.warning("worker.redis_trouble", loop="drain", error=reason(error), rows=len(self._rows))
                return
            await asyncio.sleep(LAST_WORDS_S / 3)

    async def hand_back(self, *, failed: bool) -> None:
        """Give what is left to the others at once, and let them fetch its KV; `failed`: the engine has, over these."""
        rows = self._rows.occupying()
        if await self._hand_back(rows, failed=failed, leaves=True) and not failed:
            await self._peers.linger([row.id for row in rows])

    async def _hand_back(self, rows: list[ClaimedRow], *, failed: bool, leaves: bool = False) -> bool:
        """True if Redis has taken them; `leaves`: nothing more is claimed, so this worker's own streams go."""
        try:
            async with asyncio.timeout(SET_ASIDE_S + 2 * LAST_WORDS_S):
                if rows:
                    await self._returns.hand_back(rows, failed=failed)
                    log.info("worker.handed_back", sequences=len(rows))
                if leaves:
                    await self._queue.delete_worker_streams(self._worker_id)
        except (RedisError, OSError) as error:
            log.warning("worker.redis_trouble", loop="hand_back", error=reason(error), sequences=len(rows))
            return False
        return True
