"""Taking in a job: inputs streamed into Redis, made visible when complete, once per idempotency key.

The inputs go under the new job's own id first, with a time to live of an hour. Then the idempotency key is set to that
id if it is free, and last the job becomes visible. So two submitters never write into one job; the one that comes
second deletes what it wrote; and a submitter that died in between leaves either nothing that lasts, or a complete job
which the next call with the same key makes visible.
"""

import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec
from redis.asyncio import Redis

from shared.errors import ConflictError, InvalidRequestError, ServiceUnavailableError
from shared.jobs import InputLine, JobSpec
from shared.redis import keys
from shared.redis.connection.client import Script, ask, ask_all

INTAKE_TTL_S = 3_600
MAX_N = 4_096  # a group is enqueued as one
CHUNK_LINES = 256
CHUNK_BYTES = 1_048_576
LISTED_S = 14 * keys.DAY_S  # a job that is listed longer than this has long expired

_publish = Script("job_publish")
_forget_key = Script("job_forget_key")

Inputs = AsyncIterator[InputLine] | Iterable[InputLine]


async def submit(redis: Redis, spec: JobSpec, inputs: Inputs, idempotency_key: str) -> tuple[str, bool]:
    """Write the job and make it visible; its id, and whether this call created it (see JobStore.create)."""
    _check(spec)
    request = _fingerprint(spec)
    known = await known_job(redis, idempotency_key, spec.tenant, request)
    if known:
        return known, False
    await _write(redis, spec, inputs, request)
    while idempotency_key and not await redis.set(
        keys.job_idempotency(idempotency_key, spec.tenant), spec.id, nx=True, ex=keys.IDEMPOTENCY_TTL_S
    ):
        known = await known_job(redis, idempotency_key, spec.tenant, request)
        if known:
            await _discard(redis, spec.id)
            return known, False
    if not await _make_visible(redis, spec.id):
        raise InvalidRequestError("the inputs took more than an hour to arrive")
    return spec.id, True


async def known_job(redis: Redis, idempotency_key: str, tenant: str = "", request: str = "") -> str:
    """The id of the tenant's visible job under this key, or ""; ConflictError when it is not that of this `request`."""
    if not idempotency_key:
        return ""
    name = keys.job_idempotency(idempotency_key, tenant)
    raw = await redis.get(name)
    if raw is None:
        return ""
    job_id: str = raw.decode()
    if not await _make_visible(redis, job_id):
        await _forget_key(redis, [name], [job_id])
        return ""
    stored = await ask(redis, "HGET", keys.job(job_id), "request")
    if request and stored is not None and stored.decode() != request:
        raise ConflictError(f"idempotency key {idempotency_key!r} belongs to another request, {job_id}")
    return job_id


def _check(spec: JobSpec) -> None:
    if not 1 <= spec.n <= MAX_N:
        raise InvalidRequestError(f"n must be between 1 and {MAX_N}", param="n")
    if spec.kind == "batch" and spec.n != 1:
        raise InvalidRequestError("a batch's lines are sequences of their own: n is 1", param="n")
    if spec.kind == "score":
        if spec.n != 1:
            raise InvalidRequestError("a score job takes n=1: there is nothing to sample", param="n")
        if not spec.score_logprobs and spec.reward is None:
            raise InvalidRequestError("a score job wants score_logprobs, a reward, or both", param="reward")
    if spec.kind == "rollout" and spec.reward is None:
        raise InvalidRequestError("a rollout needs a reward; use kind 'generate' without one", param="reward")


def _fingerprint(spec: JobSpec) -> str:
    """Hash of all that two submissions under one idempotency key must have in common."""
    bare = msgspec.structs.replace(spec, id="", created_ms=0, deadline_ms=0, total_prompts=0, trace="", key="")
    return hashlib.sha256(msgspec.json.encode(bare, order="sorted")).hexdigest()[:32]


async def _make_visible(redis: Redis, job_id: str) -> bool:
    """False when there is no complete job with this id."""
    state, written, tenant = await ask(redis, "HMGET", keys.job(job_id), "state", "written", "tenant")
    if state is not None:
        return True
    if written is None:
        return False
    now = time.time()
    listed = {keys.jobs(), keys.jobs((tenant or b"").decode())}
    added = [("ZADD", key, now, job_id) for key in (*listed, keys.active_jobs())]
    kept = [("EXPIRE", key, keys.JOB_TTL_S) for _, key, *_ in added]
    await ask_all(redis, [*added, *kept, *(("ZREMRANGEBYSCORE", key, "-inf", now - LISTED_S) for key in listed)])
    return bool(await _publish(redis, _names(job_id), [str(keys.JOB_TTL_S)]))


async def _write(redis: Redis, spec: JobSpec, inputs: Inputs, request: str) -> None:
    try:
        total = await _write_inputs(redis, spec.id, inputs)
        if not total:
            raise InvalidRequestError("a job needs at least one prompt", param="prompts")
        if spec.total_prompts not in (0, total):
            raise InvalidRequestError(f"{spec.total_prompts} prompts were announced, {total} came", param="prompts")
        seed = spec.sampling.seed if spec.sampling.seed is not None else secrets.randbits(53)
        spec = msgspec.structs.replace(
            spec, total_prompts=total, sampling=msgspec.structs.replace(spec.sampling, seed=seed)
        )
        async with redis.pipeline(transaction=True) as pipe:
            fields: dict[str, Any] = {"spec": msgspec.json.encode(spec), "total": spec.total}
            fields |= {"request": request, "written": 1, "tenant": spec.tenant}
            pipe.hset(keys.job(spec.id), mapping=fields)
            pipe.expire(keys.job(spec.id), INTAKE_TTL_S)
            await pipe.execute()
    except Exception:
        with contextlib.suppress(Exception):  # else its time to live deletes it
            await _discard(redis, spec.id)
        raise


async def _write_inputs(redis: Redis, job_id: str, inputs: Inputs) -> int:
    key = keys.job_inputs(job_id)
    total = 0
    chunk: list[bytes] = []
    size = 0

    async def flush() -> None:
        async with redis.pipeline(transaction=True) as pipe:
            pipe.rpush(key, *chunk)
            pipe.expire(key, INTAKE_TTL_S)
            length = (await pipe.execute())[0]
        if length != total:
            raise ServiceUnavailableError("the submission was interrupted: submit it again")

    async for line in _lines(inputs):
        chunk.append(line)
        total += 1
        size += len(line)
        if len(chunk) >= CHUNK_LINES or size >= CHUNK_BYTES:
            await flush()
            chunk, size = [], 0
    if chunk:
        await flush()
    return total


async def _lines(inputs: Inputs) -> AsyncIterator[InputLine]:
    if isinstance(inputs, AsyncIterator):
        async for line in inputs:
            yield line
    else:
        for line in inputs:
            yield line


async def _discard(redis: Redis, job_id: str) -> None:
    await redis.delete(*_names(job_id))


def _names(job_id: str) -> list[str]:
    return [keys.job(job_id), keys.job_inputs(job_id), keys.job_images(job_id)]
