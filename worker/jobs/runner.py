"""The job runner's process: an arq worker that is woken instead of polling, and a sweeper.

arq looks for ticks when one is announced on the wake channel, when one ends, and every half second for those that are
due later. The sweeper enqueues a tick for every job that is not terminal and whose lease is free; ticks are
numbered, so this does nothing where one waits already. It is what carries a job past the death of a runner.
"""

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from typing import Any

import structlog
from arq.worker import Worker, func
from redis.exceptions import RedisError

from shared.errors import ParallmError
from shared.process.open_files import raise_file_limit
from shared.process.process_settings import RunnerSettings
from shared.redis.connection.client import connect
from shared.redis.connection.faults import reason
from shared.redis.jobs.ledger import LEASE_MS
from shared.redis.jobs.ticks import TICK, WAKE_CHANNEL, arq_redis, deserialize, enqueue_tick, queue_name, serialize
from shared.redis.processes.metric_store import MetricWriter
from shared.scoring.pool import RewardPool
from worker.jobs.collecting import Collecting
from worker.jobs.context import TickContext
from worker.jobs.judging import Judging
from worker.jobs.scores import Scores
from worker.jobs.tick import tick
from worker.jobs.verdicts import Verdicts
from worker.jobs.work import settle

log = structlog.get_logger()

SWEEP_S = 2.0
FALLBACK_POLL_S = 0.5
DRAIN_S = 6  # a tick ends within about two seconds, and what it is rewarding is finished first
TICK_LIMIT_S = 600  # a tick is bounded by itself; this only ends one that hangs


class RunnerWorker(Worker):  # type: ignore[misc]  # arq has no types
    """arq's worker, woken by pub/sub, that outlives a Redis that is away for a while.

    Relies on seven of arq's internals (0.28, pinned): `_poll_iteration`, `_release_sem_dec_counter_on_complete`,
    `_sleep_until_tasks_complete`, `in_progress_timeout_s`, `start_jobs`, `tasks` and `handle_sig_wait_for_completion`.
    """

    def __init__(self, context: TickContext, max_jobs: int) -> None:
        super().__init__(
            functions=[func(_run_tick, name=TICK, keep_result=0, timeout=TICK_LIMIT_S, max_tries=1_000_000)],
            queue_name=queue_name(context.redis),
            redis_pool=arq_redis(context.redis),
            ctx={"context": context},
            max_jobs=max_jobs,
            keep_result=0,
            poll_delay=0,
            queue_read_limit=100_000,
            health_check_interval=30,
            job_completion_wait=DRAIN_S,
            job_serializer=serialize,
            job_deserializer=deserialize,
            log_results=False,
        )
        self.in_progress_timeout_s = 2 * LEASE_MS / 1000  # the job's own lease decides; a dead runner's mark goes soon
        self._context = context
        self._wake = asyncio.Event()

    async def listen(self) -> None:
        """Wait for announcements of ticks, until cancelled."""
        while True:
            with contextlib.suppress(RedisError, OSError):
                async with self._context.blocking.pubsub() as channel:
                    await channel.subscribe(WAKE_CHANNEL)
                    async for _ in channel.listen():  # the first message is the subscription's own
                        self._wake.set()
            await asyncio.sleep(FALLBACK_POLL_S)

    async def sweep(self) -> None:
        """Enqueue ticks of jobs that no runner advances, and settle ended ones, until cancelled."""
        while True:
            with contextlib.suppress(RedisError, OSError):
                for job in await self._context.ledger.active():
                    if job.ended and not job.leased:
                        await self._settle(job.id)
                    elif not job.leased:
                        await enqueue_tick(self._context.redis, job.id, job.tick)
            await asyncio.sleep(SWEEP_S)

    async def _settle(self, job_id: str) -> None:
        ledger = self._context.ledger
        try:
            await settle(self._context, await ledger.spec(job_id), await ledger.progress(job_id))
        except ParallmError as error:  # it has been deleted, or another release has taken it
            log.warning("runner.job_not_settled", job=job_id, error=error.message)
            self._context.forget(job_id)
            await ledger.settled(job_id)

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """As arq's, but skips ticks that run here: a long one's mark may have expired while it is still queued."""
        running = {name.encode() for name, task in self.tasks.items() if not task.done()}
        await super().start_jobs([each for each in job_ids if each not in running])

    def _release_sem_dec_counter_on_complete(self) -> None:
        super()._release_sem_dec_counter_on_complete()
        self._wake.set()

    async def _poll_iteration(self) -> None:
        self._wake.clear()
        try:
            await super()._poll_iteration()
        except (RedisError, OSError) as error:
            log.warning("runner.redis_away", error=reason(error))
            await asyncio.sleep(FALLBACK_POLL_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FALLBACK_POLL_S):  # wait_for may lose a cancellation before Python 3.12
                await self._wake.wait()

    def handle_sig_wait_for_completion(self, signum: Any) -> None:
        """On SIGTERM and SIGINT: start no more ticks, let the running ones end, then leave."""
        self._context.stopping.set()
        super().handle_sig_wait_for_completion(signum)

    async def _sleep_until_tasks_complete(self) -> None:
        """As arq's, which waits for the poll that clears the table, and so for Redis when it is away."""
        if not self.tasks:
            return
        _, late = await asyncio.wait(list(self.tasks.values()), timeout=DRAIN_S)
        for task in late:  # they wait for a Redis that is away; the next runner repeats them
            task.cancel()


async def run(settings: RunnerSettings) -> None:
    """Advance jobs until a signal."""
    logging.getLogger("arq").setLevel(logging.WARNING)
    raise_file_limit()  # a job that waits has a connection of its own, and macOS gives 256 files
    redis, blocking = connect(settings.redis), connect(settings.redis, blocking=True)
    pool = RewardPool(settings.reward_processes, settings.reward_timeout_s)
    context = TickContext(runner_id(), redis, blocking, pool, window=settings.window)
    worker = RunnerWorker(context, settings.max_jobs)
    counts = MetricWriter(redis, context.tally, "runner", context.runner)
    counting = asyncio.create_task(counts.run())
    judging = Judging(context, settings.judge_model, settings.judge_after_s)
    collecting = Collecting(context, settings.trajectory_buffer_size, settings.trajectory_buffer_mb << 20, judging)
    verdicts = Verdicts(redis, settings.trajectory_buffer_size, settings.trajectory_buffer_mb << 20)
    loops = (worker.listen(), worker.sweep(), collecting.run(), verdicts.run(), judging.run(), Scores(context).run())
    background = [asyncio.create_task(loop) for loop in loops]
    log.info("runner.ready", runner=context.runner, max_jobs=settings.max_jobs, window=settings.window)
    try:
        with contextlib.suppress(asyncio.CancelledError):  # how arq leaves after a signal
            await worker.async_run()
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, *worker.tasks.values(), return_exceptions=True)
        counting.cancel()  # writes a last time, now that the ticks are over
        await asyncio.gather(counting, return_exceptions=True)
        context.close()
        pool.close()
        await context.served.close()
        with contextlib.suppress(RedisError, OSError):  # TimeoutError is an OSError
            async with asyncio.timeout(1):
                await redis.delete(worker.health_check_key)
        await redis.aclose()
        await blocking.aclose()
        log.info("runner.stopped", runner=context.runner)


def runner_id() -> str:
    """Names this process in leases and logs."""
    return f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


async def _run_tick(ctx: dict[str, Any], job_id: str, number: int) -> None:
    await tick(ctx["context"], job_id, number)
