"""Batches in Redis: what was asked for, how far it is, and which api process works on it.

A batch's life: validating -> in_progress (its job runs) -> finalizing -> completed, failed, expired or cancelled. The
job's own state says which of the middle states it is; what is stored here is what the job does not know.

Invariants. A batch has at most one job. A terminal state is entered once and never left. Whatever api processes do is
done under a lease and may be done again from the start by another one.
"""

import hashlib
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec
from redis.asyncio import Redis

from shared.errors import UnknownBatchError
from shared.owners import ANYBODY, Asker
from shared.redis import keys
from shared.redis.connection.client import Script, ask_all, members
from shared.redis.due import webhooks
from shared.webhooks import Webhook

BatchState = Literal["validating", "in_progress", "completed", "failed", "expired", "cancelled"]
READ_AT_ONCE = 128  # batches that one call to Redis reads: decoding them takes some milliseconds
ENDED: frozenset[str] = frozenset({"completed", "failed", "expired", "cancelled"})

PREFIX = "batch_"  # of the ids of OpenAI's; other protocols' have theirs

_lease = Script("job_lease")
_change = Script("batch_change")


class BatchSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A batch as the client has submitted it."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int  # Unix seconds
    expires_at: int
    output_file_id: str  # given out when the batch has ended and the file has lines
    error_file_id: str
    output_ttl_s: int
    metadata: dict[str, str] = {}
    tenant: str = ""  # who owns it, its job and its files (shared/owners.py)
    key: str = ""  # the name of the API key that made it; api processes work on it in this key's turn
    webhook: Webhook | None = None  # notified of its end
    digest: str = ""  # SHA-256 of what was asked for, where it came with the request and not as a file
    rings: tuple[str, ...] = ()  # others that the api process serves that took it; its lines may name their models
    cache: bool = True  # of its sequences


class BatchError(msgspec.Struct, frozen=True):
    """Why a batch as a whole failed; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct, frozen=True):
    """A batch as it is stored."""

    spec: BatchSpec
    state: BatchState
    job: str = ""
    model: str = ""
    errors: tuple[BatchError, ...] = ()
    cancelling_at: int = 0
    in_progress_at: int = 0
    finalizing_at: int = 0
    ended_at: int = 0
    lines: int = 0
    completed: int = 0  # lines, when the batch has ended
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    has_output: int = 0
    has_errors: int = 0
    input_tokens: int = 0  # of the answered lines, as in their answers
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    ring: str = ""  # where its job is; "": where the batch is


def new_batch_id(idempotency_key: str = "", tenant: str = "", prefix: str = PREFIX) -> str:
    """A fresh id; with a key, the one that belongs to this key of the tenant. `prefix`: of its protocol's ids."""
    if idempotency_key:
        named = f"{tenant}\0{idempotency_key}" if tenant else idempotency_key
        return f"{prefix}{hashlib.sha256(named.encode()).hexdigest()[:48]}"
    return f"{prefix}{secrets.token_hex(24)}"


class BatchStore:
    """Batches by id: their specification, progress, lease and expiry."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def create(self, spec: BatchSpec, lines: int = 0) -> None:
        """Store a batch, to be validated; one with this id that is there already stays as it is.

        `lines`: how many it has, where that is known before they are validated.
        """
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hsetnx(keys.batch(spec.id), "spec", msgspec.json.encode(spec).decode())
            pipe.hsetnx(keys.batch(spec.id), "state", "validating")
            pipe.hsetnx(keys.batch(spec.id), "lines", str(lines))
            pipe.expire(keys.batch(spec.id), keys.BATCH_TTL_S)
            await pipe.execute()
        await self._list(spec)

    async def keep_listed(self, record: BatchRecord) -> None:
        """Put a batch that has not ended on its lists, in case the process that stored it could not any more."""
        if record.state not in ENDED:
            await self._list(record.spec)

    async def _list(self, spec: BatchSpec) -> None:
        lists = {keys.batches(), keys.batches(spec.tenant), keys.pending_batches()}
        added = [("ZADD", key, "NX", time.time(), spec.id) for key in lists]
        old = [("ZREMRANGEBYSCORE", key, "-inf", spec.created_at - 2 * keys.BATCH_TTL_S) for key in lists]
        kept = [("EXPIRE", key, keys.BATCH_TTL_S) for key in lists]
        await ask_all(self._redis, [*added, *old, *kept])
        if spec.webhook is not None:
            await webhooks.wait_for(self._redis, spec.tenant, "batch", spec.id)

    async def find(self, batch_id: str, prefix: str = "") -> BatchRecord:
        """A batch by its id; UnknownBatchError when there is none, or none with this prefix: another protocol's."""
        (record,) = await self._find([batch_id]) if batch_id.startswith(prefix) else (None,)
        if record is None:
            raise unknown_batch(batch_id)
        return record

    async def page(
        self, limit: int, after: str, asker: Asker = ANYBODY, *, prefix: str = "", newest_first: bool = True
    ) -> tuple[list[BatchRecord], bool]:
        """The asker's batches from the one after `after`, newest first or oldest first, and whether there are more.

        `prefix`: of the ids of those that are of interest.
        """
        listed, start, count = keys.batches(asker.tenant if asker.limited else ""), 0, limit + 1
        if after:
            rank = await (self._redis.zrevrank if newest_first else self._redis.zrank)(listed, after)
            if rank is None or not after.startswith(prefix):
                raise unknown_batch(after, "after")
            start = int(rank) + 1
        page: list[BatchRecord] = []
        while len(page) <= limit:
            raws = await self._redis.zrange(listed, start, start + count - 1, desc=newest_first)
            if not raws:
                break
            ids = [name for name in (raw.decode() for raw in raws) if name.startswith(prefix)]
            page += [record for record in await self._find(ids) if record is not None]
            start, count = start + len(raws), READ_AT_ONCE  # there were ids of others, or of batches that are gone
        return page[:limit], len(page) > limit

    async def pending(self) -> AsyncIterator[BatchRecord]:
        """The batches that have not ended; the others are taken off the list."""
        ids = await members(self._redis, keys.pending_batches())
        for at in range(0, len(ids), READ_AT_ONCE):
            part = ids[at : at + READ_AT_ONCE]
            gone = []
            for batch_id, record in zip(part, await self._find(part), strict=True):
                if record is None or record.state in ENDED:
                    gone.append(batch_id)
                else:
                    yield record
            if gone:
                await self._redis.zrem(keys.pending_batches(), *gone)

    async def change(self, batch_id: str, **fields: Any) -> bool:
        """Set fields of a batch that has not ended; False when it has."""
        argv: list[str | bytes] = [str(keys.BATCH_TTL_S)]
        for name, value in fields.items():
            argv += [name, msgspec.json.encode(value) if isinstance(value, tuple) else str(value)]
        return bool(await _change(self._redis, [keys.batch(batch_id)], argv))

    async def end(self, batch_id: str, state: BatchState, **fields: Any) -> bool:
        """Enter a terminal state; False when the batch was in one."""
        ended = await self.change(batch_id, **fields, ended_at=int(time.time()), state=state)
        await self._redis.zrem(keys.pending_batches(), batch_id)
        if ended:
            await webhooks.hasten(self._redis, "batch", batch_id)
        return ended

    async def delete(self, spec: BatchSpec) -> None:
        """Forget a batch that has ended; its files and its job are others' to delete."""
        listed = [("ZREM", key, spec.id) for key in {keys.batches(), keys.batches(spec.tenant)}]
        await ask_all(self._redis, [*listed, ("DEL", keys.batch(spec.id))])

    async def take(self, batch_id: str, owner: str) -> bool:
        """Take the batch's lease; False when another api process has it."""
        return bool(await self._redis.set(keys.batch_lease(batch_id), owner, nx=True, px=keys.BATCH_LEASE_MS))

    async def renew(self, batch_id: str, owner: str) -> bool:
        """Renew the lease; False when another process has it."""
        return bool(await _lease(self._redis, [keys.batch_lease(batch_id)], [owner, str(keys.BATCH_LEASE_MS)]))

    async def release(self, batch_id: str, owner: str) -> None:
        """End the owner's lease, so that another process may take the batch."""
        await _lease(self._redis, [keys.batch_lease(batch_id)], [owner, "0"])

    async def _find(self, ids: list[str]) -> "list[BatchRecord | None]":
        return [_record(row) for row in await ask_all(self._redis, [("HGETALL", keys.batch(i)) for i in ids])]


def unknown_batch(batch_id: str, param: str | None = None) -> UnknownBatchError:
    """The error for a batch that is not there."""
    return UnknownBatchError(f"no batch {batch_id!r}, or its time to live is over", param=param)


def _record(row: dict[bytes, bytes]) -> BatchRecord | None:
    if b"spec" not in row:
        return None
    fields: dict[str, Any] = {name.decode(): value.decode() for name, value in row.items()}
    for name in ("spec", "errors"):
        if name in fields:
            fields[name] = msgspec.json.decode(fields[name])
    return msgspec.convert(fields, BatchRecord, strict=False)
