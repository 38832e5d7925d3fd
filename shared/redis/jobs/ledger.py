"""A job's progress as runners store it: its lease, its cursor, its results, its end (invariants: store.py)."""

import contextlib
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
from redis.asyncio import Redis

from shared.errors import UnknownJobError
from shared.jobs import TERMINAL, InputLine, JobSpec, JobState, JobUsage
from shared.redis import keys
from shared.redis.connection.client import Argument, Script, ask, ask_all, members
from shared.redis.due import webhooks
from shared.trajectories import Reward

Outcome = Literal["succeeded", "failed", "cancelled", "expired"]

LEASE_MS = 4_000
_WALK = 4_096  # ordinals that one call may advance complete_through over
_RECORD_BATCH = 64

_begin = Script("job_begin")
_lease = Script("job_lease")
_expand = Script("job_expand")
_record = Script("job_record")
_finish = Script("job_finish")

decode_job_spec = msgspec.json.Decoder(JobSpec).decode


class SampleRecord(NamedTuple):
    """A finished sample: its result line, and what it adds to the job's counts."""

    ordinal: int
    line: bytes  # a trajectory, JSON
    outcome: Outcome
    usage: JobUsage = JobUsage()
    reward: Reward | None = None


class JobProgress(NamedTuple):
    """Progress of a job, as a tick reads it."""

    state: JobState
    expanded: int  # prompts whose sequences have been enqueued or recorded
    recorded: int  # samples
    complete_through: int
    cancelled: bool  # its end has been requested
    progress_ms: int  # when something last moved
    now_ms: int  # Redis's clock


class ActiveJob(NamedTuple):
    """A job that is not settled, as the sweeper reads it."""

    id: str
    tick: int
    leased: bool
    ended: bool


class JobLedger:
    """A job's progress, written by whichever runner holds its lease."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def spec(self, job_id: str) -> JobSpec:
        """The job's specification; an error for an unknown job."""
        raw = await ask(self._redis, "HGET", keys.job(job_id), "spec")
        if raw is None:
            raise unknown_job(job_id)
        return decode_job_spec(raw)

    async def begin(self, job_id: str, runner: str, number: int) -> int | None:
        """Take the job's lease for tick `number`; the next tick's number, or None when this tick is not to run."""
        following = await _begin(
            self._redis, [keys.job(job_id), keys.job_lease(job_id)], [runner, str(number), str(LEASE_MS)]
        )
        return int(following) if following >= 0 else None

    async def renew(self, job_id: str, runner: str) -> bool:
        """Renew the lease; False when another runner has it."""
        return bool(await _lease(self._redis, [keys.job_lease(job_id)], [runner, str(LEASE_MS)]))

    async def release(self, job_id: str, runner: str) -> None:
        """End the runner's lease, so that another runner may take the job."""
        await _lease(self._redis, [keys.job_lease(job_id)], [runner, "0"])

    async def progress(self, job_id: str) -> JobProgress:
        """The present progress of the job."""
        fields = ("state", "expanded", "recorded", "complete_through", "cancel", "progress_ms")
        values, (seconds, micros) = await ask_all(self._redis, [("HMGET", keys.job(job_id), *fields), ("TIME",)])
        if values[0] is None:
            raise unknown_job(job_id)
        state, expanded, recorded, through, cancel, progress_ms = values
        return JobProgress(
            state=state.decode(),
            expanded=int(expanded or 0),
            recorded=int(recorded or 0),
            complete_through=int(through or 0),
            cancelled=cancel is not None,
            progress_ms=int(progress_ms or 0),
            now_ms=seconds * 1000 + micros // 1000,
        )

    async def inputs(self, job_id: str, start: int, count: int) -> list[InputLine]:
        """Input lines of prompts [start, start + count)."""
        key = keys.job_inputs(job_id)
        renewed = [("EXPIRE", each, keys.JOB_TTL_S) for each in (key, keys.job_images(job_id))]
        commands: list[tuple[Argument, ...]] = [("LRANGE", key, start, start + count - 1), *renewed]
        lines: list[InputLine] = (await ask_all(self._redis, commands))[0]
        return lines

    async def inputs_at(self, job_id: str, prompts: Sequence[int]) -> list[InputLine]:
        """Input lines of these prompts."""
        return await ask_all(self._redis, [("LINDEX", keys.job_inputs(job_id), prompt) for prompt in prompts])

    async def expanded(self, job_id: str, prompts: int) -> None:
        """Move the cursor forward by the prompts whose sequences are enqueued."""
        await _expand(self._redis, [keys.job(job_id)], [str(prompts)])

    async def record(self, job_id: str, samples: Sequence[SampleRecord]) -> int:
        """Store finished samples; those recorded before change nothing. Returns how many were new."""
        new = 0
        for at in range(0, max(len(samples), 1), _RECORD_BATCH):
            argv: list[str | bytes] = [str(keys.JOB_TTL_S), str(keys.RESULTS_PER_CHUNK), str(_WALK)]
            for sample in samples[at : at + _RECORD_BATCH]:
                argv += _record_arguments(sample)
            names = [keys.job(job_id), keys.job_results(job_id, ""), keys.job_order(job_id)]
            added, _ = await _record(self._redis, names, argv)
            if added < 0:
                break
            new += added
        return new

    async def unrecorded(self, job_id: str, start: int, stop: int) -> list[int]:
        """The ordinals in [start, stop) that have no result yet."""
        missing: list[int] = []
        for chunk in range(start // keys.RESULTS_PER_CHUNK, -(-stop // keys.RESULTS_PER_CHUNK)):
            done = {int(o) for o in await ask(self._redis, "HKEYS", keys.job_results(job_id, chunk))}
            first = chunk * keys.RESULTS_PER_CHUNK
            ordinals = range(max(start, first), min(stop, first + keys.RESULTS_PER_CHUNK))
            missing += [ordinal for ordinal in ordinals if ordinal not in done]
        return missing

    async def finish(self, job_id: str, state: JobState, error: str = "", *, only_queued: bool = False) -> bool:
        """End the job; False when it has ended, when success lacks samples, or when it has started (`only_queued`)."""
        rest = "failed" if state == "failed" else "expired" if state == "expired" else "cancelled"
        argv = [state, error, rest, str(keys.JOB_TTL_S), "1" if only_queued else "0"]
        names = [keys.job(job_id), keys.job_inputs(job_id), keys.job_images(job_id)]
        ended: bool = await _finish(self._redis, names, argv) == 1
        if ended:
            with contextlib.suppress(UnknownJobError):  # a client that saw its end has deleted it
                await self._keep_results(job_id)
            await webhooks.hasten(self._redis, "job", job_id)
        return ended

    async def settled(self, job_id: str) -> None:
        """Take an ended job off the list of active ones: nothing of it is in flight or reserved any more."""
        await self._redis.zrem(keys.active_jobs(), job_id)

    async def count_fault(self, job_id: str) -> int:
        """Note that a tick failed; returns how many have failed in a row."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hincrby(keys.job(job_id), "faults", 1)
            pipe.expire(keys.job(job_id), keys.JOB_TTL_S)
            return int((await pipe.execute())[0])

    async def clear_faults(self, job_id: str) -> None:
        """Note that a tick went well."""
        await ask(self._redis, "HDEL", keys.job(job_id), "faults")

    async def active(self) -> list[ActiveJob]:
        """The jobs that are not settled; those that are gone are taken off the list."""
        ids = await members(self._redis, keys.active_jobs())
        if not ids:
            return []
        commands: list[tuple[str | int, ...]] = [
            ("EXPIRE", key, keys.JOB_TTL_S) for key in (keys.active_jobs(), keys.jobs())
        ]
        for job_id in ids:
            commands += [("HMGET", keys.job(job_id), "state", "tick", "written"), ("EXISTS", keys.job_lease(job_id))]
        answers = (await ask_all(self._redis, commands))[2:]
        jobs: list[ActiveJob] = []
        gone: list[str] = []
        for job_id, (state, tick, written), leased in zip(ids, answers[::2], answers[1::2], strict=True):
            if state is None and written is not None:
                continue  # being submitted
            if state is None:
                gone.append(job_id)
            else:
                jobs.append(ActiveJob(job_id, int(tick or 0), bool(leased), state.decode() in TERMINAL))
        if gone:
            await self._redis.zrem(keys.active_jobs(), *gone)
        return jobs

    async def _keep_results(self, job_id: str) -> None:
        """Give all results the time to live of the job, which has just ended."""
        chunks = range(math.ceil((await self.spec(job_id)).total / keys.RESULTS_PER_CHUNK))
        kept = [*(keys.job_results(job_id, chunk) for chunk in chunks), keys.job_order(job_id)]
        await ask_all(self._redis, [("EXPIRE", key, keys.JOB_TTL_S) for key in kept])


def unknown_job(job_id: str) -> UnknownJobError:
    """The error for a job that is not there."""
    return UnknownJobError(f"no job {job_id!r}, or its time to live is over")


def _record_arguments(sample: SampleRecord) -> tuple[str | bytes, ...]:
    reward = sample.reward
    return (
        str(sample.ordinal),
        sample.line,
        sample.outcome,
        str(sample.usage.prompt_tokens),
        str(sample.usage.completion_tokens),
        "" if reward is None or reward.value is None else repr(float(reward.value)),
        "1" if reward is not None and reward.error else "0",
    )
