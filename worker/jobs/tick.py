"""One tick of a job: the whole story of a batch job, in a few seconds at a time.

    take the lease -> expand a window of prompts into sequences -> gather what workers have finished -> reward it ->
    record it -> until all is recorded: finish.  After about two seconds: give the lease back and enqueue the next tick.

Everything is repeatable. A sequence's id follows from its sample, and the queue ignores an id that it knows; a sample
is recorded once; a result leaves the stream of finished sequences only after it is recorded. So a runner may die
anywhere, and two may even work on one job: the lease saves them the effort, correctness does not depend on it.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import structlog
from redis.exceptions import ConnectionError, RedisError, TimeoutError

from shared.errors import ServiceUnavailableError, UnknownAdapterError, UnknownJobError, UnknownModelError
from shared.jobs import JobSpec
from shared.redis.connection.faults import is_refusal, reason
from shared.redis.jobs.ledger import LEASE_MS
from shared.redis.jobs.ticks import enqueue_tick
from shared.telemetry import tracing
from worker.jobs.context import TickContext
from worker.jobs.work import JobWork

log = structlog.get_logger()

TICK_S = 2.0
MAX_FAULTS = 5  # ticks in a row that raise, before the job fails
REDIS_AWAY = (ConnectionError, TimeoutError, OSError)


async def tick(context: TickContext, job_id: str, number: int) -> None:
    """Run tick `number` of the job, unless it has run, and enqueue the next one while there is more to do."""
    following = await context.ledger.begin(job_id, context.runner, number)
    if following is None:
        return
    delay_s = 0.0
    more = True
    try:
        async with _lease_kept(context, job_id):
            more = await _advance(context, job_id, number)
        await context.ledger.clear_faults(job_id)
    except (*REDIS_AWAY, ServiceUnavailableError):
        raise  # the sweeper takes it up again when Redis is back, or processes can be started
    except Exception as error:
        if is_refusal(error):
            raise  # likewise: no fault of the job
        log.exception("job.tick_failed", job=job_id, tick=number)
        more = not await _give_up(context, job_id, error)
        delay_s = 1.0
    finally:
        await context.ledger.release(job_id, context.runner)
    if more:
        await enqueue_tick(context.redis, job_id, following, delay_s=delay_s)


async def _give_up(context: TickContext, job_id: str, error: Exception) -> bool:
    faults = await context.ledger.count_fault(job_id)
    if faults < MAX_FAULTS:
        return False
    last = reason(error) if isinstance(error, RedisError) else f"{type(error).__name__}: {error}"
    await context.ledger.finish(job_id, "failed", f"{faults} ticks in a row failed, the last one with {last}")
    return True


@contextlib.asynccontextmanager
async def _lease_kept(context: TickContext, job_id: str) -> AsyncIterator[None]:
    async def renew() -> None:
        while True:
            await asyncio.sleep(LEASE_MS / 4000)
            with contextlib.suppress(RedisError, OSError):
                await context.ledger.renew(job_id, context.runner)

    renewing = asyncio.create_task(renew())
    try:
        yield
    finally:
        renewing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await renewing


async def _advance(context: TickContext, job_id: str, number: int) -> bool:
    """Work on the job for about TICK_S; False when it has ended."""
    try:
        spec = await context.ledger.spec(job_id)
        with tracing.span("job tick", {**_attributes(spec), "parallm.job.tick": number}, link=spec.trace):
            work = await JobWork.on(context, spec)
            return await work.advance(time.monotonic() + TICK_S)
    except UnknownJobError:
        context.forget(job_id)
        return False  # its time to live is over
    except (UnknownModelError, UnknownAdapterError) as error:
        await context.ledger.finish(job_id, "failed", error.message)
        return False


def _attributes(spec: JobSpec) -> dict[str, str | int]:
    return {
        "parallm.job.id": spec.id,
        "parallm.job.kind": spec.kind,
        "parallm.job.samples": spec.total,
        "parallm.model": spec.model,
        "parallm.adapter": spec.adapter,
    }
