"""Durable jobs in Redis, for submitting and polling them; runners record progress in ledger.py.

Invariants. A job is visible when its spec and all of its inputs are written, and not before. Each sample is recorded
once; counts, usage and rewards change only then. A terminal state is entered once and never left. Every key has a time
to live, counted from the job's last change, and an unfinished submission is gone after an hour.
"""

import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence

import msgspec
from redis.asyncio import Redis

from shared.errors import ConflictError
from shared.jobs import TERMINAL, InputLine, JobCounts, JobSpec, JobState, JobStatus, JobUsage
from shared.owners import ANYBODY, Asker
from shared.redis import keys
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.client import Script, ask, ask_all
from shared.redis.due import webhooks
from shared.redis.jobs import intake as job_intake
from shared.redis.jobs.images import JobImages, images_of
from shared.redis.jobs.ledger import JobLedger, decode_job_spec, unknown_job
from shared.redis.jobs.pins import pin, unpin
from shared.redis.jobs.ticks import enqueue_tick
from shared.telemetry.tracing import traceparent

_cancel = Script("job_cancel")
INPUTS_AT_ONCE = 512

_STATUS_FIELDS = (
    "spec", "state", "succeeded", "failed", "cancelled", "expired", "expanded", "recorded", "prompt_tokens",
    "completion_tokens", "rewarded", "reward_sum", "reward_errors", "created_ms", "started_ms", "finished_ms",
    "complete_through", "error",
)  # fmt: skip


def new_job_id() -> str:
    """A fresh id; it begins with the time, so that ids sort by submission."""
    return f"job-{int(time.time()):08x}{secrets.token_hex(6)}"


class JobStore:
    """Jobs as a user sees them."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._ledger = JobLedger(redis)
        self._adapters = AdapterStore(redis)

    async def create(self, spec: JobSpec, inputs: job_intake.Inputs, idempotency_key: str = "") -> tuple[str, bool]:
        """Store a job and let it run; returns its id, and False when the key's job existed already.

        `inputs` are read once and streamed; they and the reward are checked by whoever took them in. An empty
        `spec.id` gets a fresh one, and `spec.total_prompts` 0 means as many as there are inputs. Raises
        InvalidRequestError that names the wrong field, ConflictError when the key was used for something else.
        """
        spec = msgspec.structs.replace(spec, id=spec.id or new_job_id(), trace=traceparent())
        await pin(self._adapters, spec)
        created = False
        try:
            job_id, created = await job_intake.submit(self._redis, spec, inputs, idempotency_key)
        finally:
            if not created:
                await unpin(self._adapters, spec)
        if spec.webhook is not None and (created or (await self.status(job_id)).status not in TERMINAL):
            await webhooks.wait_for(self._redis, spec.tenant, "job", job_id)
        if created:
            await enqueue_tick(self._redis, job_id, 0)
        return job_id, created

    def images(self, job_id: str, most_bytes: int) -> JobImages:
        """Store of the images for a job that is to be created under this id."""
        return JobImages(self._redis, job_id, most_bytes, job_intake.INTAKE_TTL_S)

    async def submitted_under(self, idempotency_key: str, tenant: str = "") -> str:
        """The id of the job that the tenant submitted under this key; "" when there is none."""
        return await job_intake.known_job(self._redis, idempotency_key, tenant)

    async def owner(self, job_id: str) -> str | None:
        """Owner of the job; None when there is none."""
        state, tenant = await ask(self._redis, "HMGET", keys.job(job_id), "state", "tenant")
        return None if state is None else (tenant or b"").decode()

    async def status(self, job_id: str) -> JobStatus:
        """The job as a poll sees it."""
        (status,) = await _statuses(self._redis, [job_id])
        if status is None:
            raise unknown_job(job_id)
        return status

    async def spec(self, job_id: str) -> JobSpec:
        """The job's specification; an error for an unknown job."""
        return await self._ledger.spec(job_id)

    async def cancel(self, job_id: str) -> JobStatus:
        """End the job: at once when nothing has started, else within a second, by its runner.

        What is finished stays; a terminal job is left as it is.
        """
        state = (await _cancel(self._redis, [keys.job(job_id)], [])).decode()
        if not state:
            raise unknown_job(job_id)
        if state == "queued" and await self._ledger.finish(job_id, "cancelled", only_queued=True):
            await unpin(self._adapters, await self.spec(job_id))
            await self._ledger.settled(job_id)
        return await self.status(job_id)

    async def delete(self, job_id: str) -> None:
        """Forget a job with its inputs and results; ConflictError while it runs."""
        status = await self.status(job_id)
        if status.status not in TERMINAL:
            raise ConflictError(f"job {job_id} is {status.status}: cancel it first")
        spec = await self.spec(job_id)
        await unpin(self._adapters, spec)  # its runner may not have come to it yet
        chunks = range(-(-status.counts.total // keys.RESULTS_PER_CHUNK))
        await ask(self._redis, "UNLINK", keys.finished(spec.model, job_id))
        whole = [keys.job_results(job_id, chunk) for chunk in chunks]
        whole += [keys.job_inputs(job_id), keys.job_images(job_id), keys.job_order(job_id)]
        whole.append(keys.job(job_id))  # last: until then the delete may be repeated
        listed = [("ZREM", keys.jobs(tenant), job_id) for tenant in {"", spec.tenant}]
        await ask_all(self._redis, [*(("UNLINK", key) for key in whole), *listed])

    async def submit_again(self, job_id: str) -> str:
        """A new job with the spec and the inputs of another one, without its deadline; its id."""
        spec = await self.spec(job_id)
        fresh = msgspec.structs.replace(
            spec,
            id=new_job_id(),
            created_ms=time.time_ns() // 1_000_000,
            deadline_ms=0,
            metadata={**spec.metadata, "retry_of": job_id},
        )
        return (await self.create(fresh, self._copied(job_id, fresh.id, spec.total_prompts)))[0]

    async def _copied(self, job_id: str, fresh_id: str, count: int) -> AsyncIterator[InputLine]:
        """The inputs, for a job that gets the images, too."""
        theirs = self.images(fresh_id, sys.maxsize)
        async for sha256, data in images_of(self._redis, job_id):
            await theirs.keep(sha256, data)
        for start in range(0, count, INPUTS_AT_ONCE):
            for line in await self._ledger.inputs(job_id, start, min(INPUTS_AT_ONCE, count - start)):
                yield line

    async def results(
        self, job_id: str, after: int = -1, limit: int = 1000, *, complete_only: bool = False
    ) -> list[tuple[int, bytes]]:
        """(ordinal, trajectory JSON) of finished samples in order of ordinal, from the first after `after`.

        Samples finish out of order. A reader that follows a running job by `after` passes `complete_only`, which
        stops before the first unfinished sample, so that nothing is skipped; of a terminal job it gets all there is.
        """
        status = await self.status(job_id)
        end = status.counts.total
        if complete_only and status.status not in TERMINAL:
            end = status.complete_through
        lines: list[tuple[int, bytes]] = []
        start = after + 1
        while start < end and len(lines) < limit:
            stop = min(end, (start // keys.RESULTS_PER_CHUNK + 1) * keys.RESULTS_PER_CHUNK)
            lines += await _chunk_lines(self._redis, job_id, start, stop, limit - len(lines))
            start = stop
        return lines

    async def recorded(self, job_id: str, start: int, limit: int) -> tuple[str, list[tuple[int, bytes]]]:
        """The job's state, "" when it is gone, and (place, trajectory JSON) of the next samples in the order in which
        they were recorded, from place `start` on: in a terminal state all that there will be."""
        commands = [
            ("HGET", keys.job(job_id), "state"),
            ("LRANGE", keys.job_order(job_id), start, start + limit - 1),
        ]
        state, ordinals = await ask_all(self._redis, commands)
        found = [
            ("HGET", keys.job_results(job_id, int(ordinal) // keys.RESULTS_PER_CHUNK), ordinal) for ordinal in ordinals
        ]
        lines = await ask_all(self._redis, found) if found else []
        return (state or b"").decode(), [(at, line) for at, line in enumerate(lines, start) if line is not None]

    async def listed_at(self, job_id: str, asker: Asker = ANYBODY) -> float | None:
        """Time when one of the asker's jobs was listed, in Unix seconds; None for another's job."""
        at = await self._redis.zscore(keys.jobs(asker.tenant if asker.limited else ""), job_id)
        return None if at is None else float(at)

    async def listed_before(self, at: float, limit: int, asker: Asker = ANYBODY) -> Sequence[tuple[float, JobStatus]]:
        """The asker's newest jobs that were listed before this moment, each with its own."""
        listed = keys.jobs(asker.tenant if asker.limited else "")
        found = await self._redis.zrevrangebyscore(listed, f"({at}", "-inf", start=0, num=limit, withscores=True)
        statuses = await _statuses(self._redis, [job.decode() for job, _ in found])
        return [(score, status) for (_, score), status in zip(found, statuses, strict=True) if status is not None]

    async def list(self, limit: int = 20, before: str = "", asker: Asker = ANYBODY) -> list[JobStatus]:
        """The asker's newest jobs, or those older than the job `before`."""
        listed = keys.jobs(asker.tenant if asker.limited else "")
        start = 0
        if before:
            rank = await self._redis.zrevrank(listed, before)
            if rank is None:
                raise unknown_job(before)
            start = int(rank) + 1
        ids = await self._redis.zrevrange(listed, start, start + limit - 1)
        return [status for status in await _statuses(self._redis, [i.decode() for i in ids]) if status is not None]


async def _chunk_lines(redis: Redis, job_id: str, start: int, stop: int, limit: int) -> list[tuple[int, bytes]]:
    key = keys.job_results(job_id, start // keys.RESULTS_PER_CHUNK)
    ordinals = sorted(int(o) for o in await ask(redis, "HKEYS", key))
    wanted = [o for o in ordinals if start <= o < stop][:limit]
    if not wanted:
        return []
    lines = await ask(redis, "HMGET", key, *wanted)
    return [(ordinal, line) for ordinal, line in zip(wanted, lines, strict=True) if line is not None]


async def _statuses(redis: Redis, ids: Sequence[str]) -> list[JobStatus | None]:
    return [_status(row) for row in await ask_all(redis, [("HMGET", keys.job(i), *_STATUS_FIELDS) for i in ids])]


def _status(row: Sequence[bytes | None]) -> JobStatus | None:
    fields = dict(zip(_STATUS_FIELDS, row, strict=True))
    raw_spec, raw_state = fields["spec"], fields["state"]
    if raw_spec is None or raw_state is None:
        return None

    def number(name: str) -> int:
        return int(fields[name] or 0)

    spec = decode_job_spec(raw_spec)
    state: JobState = msgspec.convert(raw_state.decode(), JobState)
    expanded = min(spec.total, number("expanded") * spec.n)
    recorded = number("recorded")
    running = state not in TERMINAL
    rewarded = number("rewarded")
    return JobStatus(
        id=spec.id,
        kind=spec.kind,
        model=spec.model,
        status=state,
        counts=JobCounts(
            total=spec.total,
            queued=spec.total - max(expanded, recorded) if running else 0,
            running=max(0, expanded - recorded) if running else 0,
            succeeded=number("succeeded"),
            failed=number("failed"),
            cancelled=number("cancelled"),
            expired=number("expired"),
        ),
        progress=recorded / spec.total if spec.total else 1.0,
        usage=JobUsage(number("prompt_tokens"), number("completion_tokens")),
        mean_reward=float(fields["reward_sum"] or 0) / rewarded if rewarded else None,
        reward_errors=number("reward_errors"),
        created_ms=number("created_ms"),
        started_ms=number("started_ms"),
        finished_ms=number("finished_ms"),
        complete_through=number("complete_through"),
        error=(fields["error"] or b"").decode(),
        metadata=spec.metadata,
        n=spec.n,
        tenant=spec.tenant,
    )
