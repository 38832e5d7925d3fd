"""The queue of sequences: Redis Streams per model and class, one consumer group, time-limited leases.

Delivery is at least once, the end exactly once: a claim is leased, a lease that is not renewed passes to another
worker under the next attempt, and an end is accepted from the owner of the current attempt alone (`commit.lua`).
One Lua call does each step, so a crash between two commands cannot lose or double a sequence.

All keys of a model share a hash tag. Times are Redis' own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.errors import EngineError, QueueFullError
from shared.frames import Finish, TokenEvent, encode_events
from shared.redis import keys
from shared.redis.client import Script, server_time_ms
from shared.redis.token_frames import Commit, FrameWriter, read_tokens
from shared.results import result_of
from shared.sequences import (
    Claim,
    SequenceClass,
    SequenceResult,
    SequenceSpec,
    Timings,
    decode_spec,
    encode,
)

log = structlog.get_logger()

CLASSES: tuple[SequenceClass, ...] = ("interactive", "batch")
QUEUE_TTL_S = 7 * keys.DAY_S
STEAL_AFTER_MS = 50
MAX_DEATHS = 3
SUSPECT_AFTER = 2


@dataclass(frozen=True)
class ClaimPlan:
    """What a worker can take now (worker/engine/scheduler.py works it out)."""

    rows: int  # free rows
    interactive_first: int  # quotas of the first round
    batch_first: int
    batch_max: int  # batch never takes more than this; interactive may take every row
    kv_tokens: int  # free KV positions; an entry that does not fit waits, and those behind it
    worker_is_empty: bool


@dataclass(frozen=True)
class QueueDepth:
    """How much waits in one class."""

    waiting: int  # not yet delivered
    leased: int
    oldest_ms: int  # age of the oldest waiting entry


_ENQUEUE, _CLAIM, _REAP = Script("enqueue"), Script("claim"), Script("reap")
_RENEW, _RELEASE, _CANCEL = Script("renew"), Script("release"), Script("cancel")


class SequenceQueue:
    """One model's queue, for those who fill it and for those who empty it."""

    def __init__(
        self,
        redis: "Redis",
        model: str,
        *,
        lease_ms: int = 3000,
        max_deaths: int = MAX_DEATHS,
        max_waiting: Mapping[SequenceClass, int] | None = None,
    ) -> None:
        self._redis = redis
        self._model = model
        self._lease_ms = lease_ms
        self._max_deaths = max_deaths
        self._max_waiting = dict(max_waiting or {})
        self._prefix = keys.sequence(model, "")
        self._tips: list[str] = ["0-0"] * 4

    # -- filling

    async def enqueue(self, specs: Sequence[SequenceSpec], *, worker: str = "") -> int:
        """Add sequences of one class, all or none; returns how many were new.

        Known ids change nothing. `worker` prefers one worker. Raises QueueFullError beyond the bound.
        """
        if not specs:
            return 0
        kind = specs[0].sequence_class
        assert all(spec.sequence_class == kind for spec in specs), "one class a call"
        args: list[str | bytes | int] = [keys.GROUP, self._max_waiting.get(kind, 0), QUEUE_TTL_S]
        for spec in specs:
            args += [spec.id, spec.group, spec.kv_tokens, spec.api, encode(spec), spec.deadline_ms]
        hashes = [keys.sequence(self._model, spec.id) for spec in specs]
        new = int(await _ENQUEUE(self._redis, [keys.queue(self._model, kind, worker), *hashes], args))
        if new < 0:
            raise QueueFullError(
                f"{-new - 1} {kind} sequences of model {self._model!r} are waiting and "
                f"{self._max_waiting[kind]} is the limit; try again shortly"
            )
        return new

    async def cancel(self, seq_ids: Sequence[str]) -> dict[str, str]:
        """Cancel sequences: '' unknown or ended, 'queued' ended here, else the worker that has been told."""
        outcome: dict[str, str] = {}
        for seq in seq_ids:
            answer = await self._cancel(seq)
            if answer.startswith("worker:"):
                worker = answer.removeprefix("worker:")
                if worker:
                    order = msgspec.msgpack.encode(("cancel", seq))
                    await self._redis.publish(keys.control_channel(worker), order)
                outcome[seq] = worker
            else:
                outcome[seq] = answer
        return outcome

    async def _cancel(self, seq: str) -> str:
        key = keys.sequence(self._model, seq)
        packed = await self._redis.hget(key, "spec")  # type: ignore[misc]
        if packed is None:
            return ""
        spec = decode_spec(packed)
        finish = Finish("cancelled")
        event = TokenEvent(seq, 0, 0, [], [], finish=finish)
        timings = Timings(enqueued_ms=spec.enqueued_ms, finished_ms=await server_time_ms(self._redis))
        result = SequenceResult(seq, finish, "", 0, len(spec.prompt_ids), timings=timings)
        answer = await _CANCEL(
            self._redis,
            [key, keys.sequence_log(self._model, seq), keys.finished(self._model, spec.job)],
            [
                keys.GROUP,
                encode(result),
                encode_events([event]),
                keys.SEQUENCE_TTL_S,
                keys.JOB_TTL_S,
                "1" if spec.job else "",
                seq,
            ],
        )
        return str(answer.decode())

    async def route(self, seq_ids: Sequence[str], api: str) -> None:
        """From now on `api` gets the frames of these sequences; their worker is told."""
        for seq in seq_ids:
            key = keys.sequence(self._model, seq)
            if await self._redis.exists(key):
                await self._redis.hset(key, "api", api)  # type: ignore[misc]
                worker = await self._redis.hget(key, "worker")  # type: ignore[misc]
                if worker:
                    order = msgspec.msgpack.encode(("route", seq, api))
                    await self._redis.publish(keys.control_channel(worker.decode()), order)

    # -- emptying

    async def claim(self, worker_id: str, plan: ClaimPlan, others: Sequence[str] = ()) -> list[Claim]:
        """Lease as much as the plan allows, in one round trip; ended and dead sequences are settled on the way."""
        streams = self._own_streams(worker_id)
        for other in others:
            streams += [keys.queue(self._model, kind, other) for kind in CLASSES]
        tips, claims = await _CLAIM(
            self._redis,
            streams,
            [
                keys.GROUP,
                worker_id,
                plan.rows,
                plan.interactive_first,
                plan.batch_first,
                plan.batch_max,
                plan.kv_tokens,
                "1" if plan.worker_is_empty else "",
                STEAL_AFTER_MS,
                self._prefix,
                self._max_deaths,
                QUEUE_TTL_S,
            ],
        )
        self._tips = [tip.decode() for tip in tips]
        return await self._sort_out(worker_id, claims)

    async def wait(self, worker_id: str, timeout_s: float) -> bool:
        """Block until something new arrives on this worker's streams; claims nothing.

        It reads without the group, from the tips that the last `claim` saw, so that quotas stay the claim's business.
        """
        streams: dict[Any, Any] = dict(zip(self._own_streams(worker_id), self._tips, strict=True))
        arrived = await self._redis.xread(streams, count=1, block=max(1, int(timeout_s * 1000)))
        return bool(arrived)

    async def reap(self, worker_id: str, limit: int, *, worker_is_empty: bool = False) -> list[Claim]:
        """Take over up to `limit` sequences whose lease has run out, from any stream of the model."""
        streams = await self._all_streams(worker_id)
        claims = await _REAP(
            self._redis,
            streams,
            [
                keys.GROUP,
                worker_id,
                self._lease_ms,
                limit,
                self._prefix,
                self._max_deaths,
                SUSPECT_AFTER,
                "1" if worker_is_empty else "",
                QUEUE_TTL_S,
            ],
        )
        return await self._sort_out(worker_id, claims)

    async def renew(self, worker_id: str, claims: Sequence[Claim]) -> list[Claim]:
        """Renew leases; returns the claims that are no longer ours."""
        by_stream: dict[str, dict[str, Claim]] = {}
        for claim in claims:
            by_stream.setdefault(claim.stream, {})[claim.entry] = claim
        lost: list[Claim] = []
        for stream, entries in by_stream.items():
            gone = await _RENEW(self._redis, [stream], [keys.GROUP, worker_id, *entries])
            lost += [entries[entry.decode()] for entry in gone]
        return lost

    async def release(self, worker_id: str, claims: Sequence[Claim]) -> None:
        """Hand claims back; another worker can take them at once, and none counts as a death."""
        for claim in claims:
            spec = claim.spec
            await _RELEASE(
                self._redis,
                [claim.stream, keys.queue(self._model, spec.sequence_class), keys.sequence(self._model, spec.id)],
                [keys.GROUP, worker_id, claim.entry, QUEUE_TTL_S],
            )

    # -- looking

    async def depth(self) -> dict[SequenceClass, QueueDepth]:
        """Waiting and leased entries by class, over the shared and all affinity streams."""
        now = await server_time_ms(self._redis)
        return {kind: await self._depth_of(kind, now) for kind in CLASSES}

    async def _depth_of(self, kind: SequenceClass, now: int) -> QueueDepth:
        waiting = leased = oldest = 0
        workers = await self._redis.zrange(keys.workers(self._model), 0, -1)
        for worker in ["", *(name.decode() for name in workers)]:
            stream = keys.queue(self._model, kind, worker)
            for group in await self._groups(stream):
                ahead = await self._redis.xrange(stream, f"({group['last-delivered-id'].decode()}", "+", count=1)
                pending = int(group["pending"])
                leased += pending
                waiting += max(0, int(await self._redis.xlen(stream)) - pending)
                if ahead:
                    oldest = max(oldest, now - int(ahead[0][0].split(b"-")[0]))
        return QueueDepth(waiting, leased, oldest)

    async def _groups(self, stream: str) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = await self._redis.xinfo_groups(stream)
        except ResponseError:  # no such key: nothing has ever been queued there
            return []
        return found

    async def delete_worker_streams(self, worker_id: str) -> None:
        """Remove a leaving worker's affinity streams when nothing is in them."""
        for kind in CLASSES:
            stream = keys.queue(self._model, kind, worker_id)
            if not await self._redis.xlen(stream):
                await self._redis.delete(stream)

    # -- inside

    def _own_streams(self, worker_id: str) -> list[str]:
        return [keys.queue(self._model, kind, affinity) for kind in CLASSES for affinity in (worker_id, "")]

    async def _all_streams(self, worker_id: str) -> list[str]:
        workers = await self._redis.zrange(keys.workers(self._model), 0, -1)
        names = dict.fromkeys(["", worker_id, *(name.decode() for name in workers)])
        return [keys.queue(self._model, kind, name) for kind in CLASSES for name in names]

    async def _sort_out(self, worker_id: str, rows: list[list[Any]]) -> list[Claim]:
        claims: list[Claim] = []
        for stream, entry, packed, attempt, api, verdict in rows:
            try:
                spec = msgspec.structs.replace(decode_spec(packed), api=api.decode())
            except (msgspec.DecodeError, ValueError) as error:
                await self._drop_unreadable(stream, entry, str(error))
                continue
            claim = Claim(spec, stream.decode(), entry.decode(), int(attempt), verdict == b"alone")
            if verdict in (b"run", b"alone"):
                claims.append(claim)
            else:
                await self._end(worker_id, claim, verdict.decode())
        return claims

    async def _end(self, worker_id: str, claim: Claim, verdict: str) -> None:
        """Commit a sequence that must not run (again), with the tokens that earlier attempts left."""
        spec = claim.spec
        events = await read_tokens(self._redis, self._model, spec.id, 0, spec.api)
        reason = f"its workers died {self._max_deaths} times" if verdict == "poison" else ""
        finish = (
            Finish("error", None, EngineError.code or "", f"given up: {reason}")
            if verdict == "poison"
            else Finish("deadline" if verdict == "deadline" else "cancelled")
        )
        position = events[-1].end if events else 0
        last = TokenEvent(spec.id, claim.attempt, position, [], [], finish=finish)
        timings = Timings(spec.enqueued_ms, 0, 0, await server_time_ms(self._redis))
        result = result_of(spec, claim.attempt, worker_id, [*events, last], timings)
        writer = FrameWriter(self._redis, self._model, worker_id)
        frames = {spec.api: [last]} if spec.api else {}
        await writer.write(frames, {}, [Commit(claim, result, [last], dead_letter=reason)])
        log.info("queue.settled", sequence=spec.id, verdict=verdict, attempt=claim.attempt)

    async def _drop_unreadable(self, stream: bytes, entry: bytes, error: str) -> None:
        """A message that this version cannot read: out of the queue, into the dead letters, the worker lives."""
        log.error("queue.unreadable", stream=stream, entry=entry, error=error)
        letters = keys.dead_letters(self._model)
        async with self._redis.pipeline() as pipe:
            pipe.xadd(letters, {"id": entry, "reason": f"unreadable: {error}"}, maxlen=1000)
            pipe.expire(letters, QUEUE_TTL_S)
            pipe.xack(stream, keys.GROUP, entry)
            pipe.xdel(stream, entry)
            await pipe.execute()
