"""Room for interactive sequences on a worker whose rows are all taken: rows of jobs go back to the queue.

Those that began last go, because they lose least: what is in their log stays said, and their seeds draw the rest again.
It is no death, and whoever has a free row goes on with them.
"""

from collections.abc import Callable, Iterable

import structlog

from shared.redis.sequence_queue import SequenceQueue
from worker.running import Running

log = structlog.get_logger()


class Room:
    """Of one worker; `cancel` ends a row in the engine."""

    def __init__(
        self, queue: SequenceQueue, worker_id: str, running: dict[str, Running], cancel: Callable[[str], None]
    ) -> None:
        self._queue = queue
        self._worker_id = worker_id
        self._running = running
        self._cancel = cancel

    def make(self, rows: int) -> list[Running]:
        """End this many rows of jobs in the engine, so that what is submitted next finds a place."""
        gone = victims(self._running.values(), rows)
        for row in gone:
            row.occupies_row = False  # what the engine still says of it is dropped
            self._cancel(row.id)
        return gone

    async def hand_back(self, rows: list[Running]) -> None:
        """Give them back; should Redis have gone, their leases run out."""
        try:
            await self._queue.release(self._worker_id, [row.claim for row in rows])
            log.info("worker.made_room", sequences=len(rows))
        finally:
            for row in rows:
                if self._running.get(row.id) is row:  # not a newer attempt, claimed meanwhile
                    del self._running[row.id]
                    self._cancel(row.id)  # should it have reached the engine only now, from its adapter


def victims(running: Iterable[Running], rows: int) -> list[Running]:
    """The rows of jobs that began last, at most `rows`."""
    jobs = [row for row in running if row.occupies_row and row.claim.spec.sequence_class == "batch" and _is_job(row)]
    return sorted(jobs, key=lambda row: -row.started_ms)[: max(0, rows)]


def _is_job(row: Running) -> bool:
    return bool(row.claim.spec.job) and not row.api  # nobody reads its tokens while they come
