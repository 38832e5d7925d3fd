"""The queue of sequences: Redis Streams per model and class, one consumer group, time-limited leases.

Delivery is at least once, the end exactly once: a claim is leased, a lease that is not renewed passes to another
worker under the next attempt, and an end is accepted from the owner of the current attempt alone (`commit.lua`).
One Lua call does each step, so a crash between two commands cannot lose or double a sequence.

Each class has a shared stream, one per worker for sequences with affinity to it, one for what was taken from dead or
leaving workers (claimed first), and one for suspects, whose workers have died twice. One of them may be guilty, so they
run apart, in halves, until it is alone (`lua/streams.lua`). All keys of a model share a hash tag. Times are Redis' own.
"""

import asyncio
import math
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.errors import LateFirstTokenError, QueueFullError, UnreadableMessageError
from shared.redis import keys
from shared.redis.connection.client import Argument, Script, ask, ask_all, members
from shared.redis.queue.dead_letters import Unusable, bury
from shared.redis.queue.settlement import Settlement
from shared.sequences import Claim, SequenceClass, SequenceSpec, decode_spec, encode

log = structlog.get_logger()

CLASSES: tuple[SequenceClass, ...] = ("interactive", "batch")
QUEUE_TTL_S = keys.JOB_TTL_S
STEAL_AFTER_MS = 50  # what waits longer for one worker goes to any
BUSY_SHARE = 0.5  # of a worker's rows; from there on a preference for it is passed over
MAX_DEATHS = 3
SUSPECT_AFTER = 2
STAGGER_S = 0.0001  # for each other worker; the first of n that wake looks after about so long
OTHERS = 32  # workers at whose streams one claim looks, and about so many wait for what is for any of them
LESS_WATCHFUL = 0.9  # times, after waking for nothing
WORKERS_AT_ONCE = 64  # whose streams one call looks through for leases that have run out
TURN_MS = 5_000  # a worker that runs empty for suspects asks for work at least this often

_ENQUEUE, _CLAIM, _REAP, _RENEW = Script("enqueue"), Script("claim"), Script("reap"), Script("renew")
_RELEASE, _DEPTH, _FORWARD = Script("release"), Script("depth"), Script("forward")


@dataclass(frozen=True)
class ClaimPlan:
    """Rows and quotas with which a worker claims sequences now (worker/claim_plan.py computes it)."""

    rows: int  # free rows
    interactive_first: int  # quotas of the first round; a group that one lets in is taken whole if the rows allow it
    batch_first: int
    batch_max: int  # batch never takes more than this; interactive may take every row
    kv_tokens: int  # free KV positions; an entry that does not fit waits, and all after it
    worker_is_empty: bool  # then the first entry need not fit, and suspects may run
    kv_window: int = 0  # positions that a row holds at most; 0: as many as it has
    kv_state: int = 0  # positions that a row takes besides, whatever its length


class Timely(NamedTuple):
    """Number of sequences that may wait so that a request's first token comes in time."""

    places: int  # -1: as many as there are
    idle_ms: int  # it counts once something has waited for so long: a worker with a free row takes it sooner


UNTIMED = Timely(-1, 0)


@dataclass(frozen=True)
class QueueDepth:
    """Size of one class's backlog."""

    waiting: int  # not yet delivered
    leased: int
    oldest_ms: int  # age of the oldest waiting entry


@dataclass
class _Asker:
    """A worker, as this process has served it."""

    tips: dict[Any, Any] = field(default_factory=dict)  # stream -> newest id that its last claim saw
    steal_in_s: float = 0.0  # until something may be stolen, 0: nothing
    held: list[Claim] = field(default_factory=list)  # as of its last renewal, and since
    renewed_at: float = -math.inf  # monotonic
    suspects: tuple[str, ...] = ()  # the last ones that it was given
    others: int = 0  # other live workers
    watchful: float = 0.0  # how often it waits for what is for any worker, beyond the least
    watches: bool = True  # it has, the last time

    @property
    def chance(self) -> float:
        """That it waits for what is for any worker."""
        return max(self.watchful, min(1.0, OTHERS / max(1, self.others)))


class SequenceQueue:
    """One model's queue, for enqueueing and for claiming."""

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
        self._settlement = Settlement(redis, model)
        self.askers: defaultdict[str, _Asker] = defaultdict(_Asker)  # by worker
        self.reclaimed = 0  # leases that `reap` has found run out

    @property
    def given_up(self) -> int:
        """Sequences that have ended as dead letters here."""
        return self._settlement.given_up

    # -- filling

    async def enqueue(
        self, specs: Sequence[SequenceSpec], *, prefer: Sequence[str] = (), timely: Timely = UNTIMED
    ) -> int:
        """Add sequences of one class, all or none; returns how many were new.

        Known ids change nothing. They wait for the least busy of the workers in `prefer`, and for any worker when all
        of those are busy, leaving or dead; after STEAL_AFTER_MS any worker takes them in either case. Raises
        QueueFullError beyond the bound, which counts what waits in the stream written to, the shared one and what was
        handed back; LateFirstTokenError beyond the places of `timely`, which counts the same.
        """
        if not specs:
            return 0
        kind = specs[0].sequence_class
        assert all(spec.sequence_class == kind for spec in specs), "one class a call"
        bound = self._max_waiting.get(kind, 0)
        args: list[Argument] = [keys.GROUP, bound, QUEUE_TTL_S, len(specs), BUSY_SHARE, *timely]
        args.append(keys.control_channel(keys.HOSTS))
        for spec in specs:
            args += [spec.id, spec.group, spec.kv_tokens, spec.api, spec.deadline_ms, spec.job, encode(spec)]
            args.append(spec.first_token_deadline_ms)
        both = sorted(CLASSES, key=lambda each: each != kind)
        names = [keys.queue(self._model, each, place) for each in both for place in ("", keys.HANDED_BACK)]
        names += [self._prefix + spec.id for spec in specs]
        for worker in prefer:
            names += [keys.worker(self._model, worker), *(keys.queue(self._model, each, worker) for each in both)]
        new = int(await _ENQUEUE(self._redis, names, [*args, *prefer]))
        if new < 0 and (not bound or len(specs) - new - 1 <= bound):
            raise LateFirstTokenError(-new - 1)
        if new < 0:
            raise QueueFullError(
                f"{-new - 1} {kind} sequences of model {self._model!r} are waiting and {bound} is the limit; "
                "try again shortly"
            )
        return new

    async def cancel(self, seq_ids: Sequence[str], *, gathered: bool = True) -> dict[str, str]:
        """Cancel sequences: '' unknown or ended, 'queued' ended here, else the worker that was notified.

        `gathered=False` when their job does not gather results any more: whenever they end, they report to none.
        """
        return await self._settlement.cancel(seq_ids, gathered)

    async def forget_ended(self, seq_ids: Sequence[str], finished: str) -> None:
        """Forget which of a job's sequences have ended, so that they can be enqueued again: their results are lost.

        Does nothing while `finished`, the job's stream, has a result, which may be one of these.
        """
        looks = [("HGET", self._prefix + seq, "state") for seq in seq_ids]
        *states, results = await ask_all(self._redis, [*looks, ("XLEN", finished)])
        ended = [seq for seq, state in zip(seq_ids, states, strict=True) if state in (b"done", b"cancelled")]
        if not results:
            await ask_all(self._redis, [("UNLINK", self._prefix + seq) for seq in ended])

    async def is_alive(self, seq: str) -> bool:
        """True while the sequence is queued or running."""
        state = await ask(self._redis, "HGET", keys.sequence(self._model, seq), "state")
        return state in (b"queued", b"running")

    async def route(self, seq_ids: Sequence[str], api: str) -> None:
        """From now on `api` gets the frames of these sequences; their workers are notified."""
        for seq in seq_ids:
            key = keys.sequence(self._model, seq)
            (state, worker), ttl = await ask_all(self._redis, [("HMGET", key, "state", "worker"), ("TTL", key)])
            if state is None:
                continue
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hset(key, "api", api)
                pipe.expire(key, max(1, ttl))  # should it have expired just now, what we made goes, too
                await pipe.execute()
            if worker and state == b"running":
                order = msgspec.msgpack.encode(("route", seq, api))
                await self._redis.publish(keys.control_channel(worker.decode()), order)

    # -- emptying

    async def claim(self, worker_id: str, plan: ClaimPlan, others: Sequence[str] = ()) -> list[Claim]:
        """Lease as much as the plan allows, in one round trip; ended and expired sequences are settled on the way.

        `others`: the other live workers. Of many each claim looks at the streams of a few, so that its time does not
        grow with them: what waits there is in good hands, and is found by and by should its worker be busy.
        """
        asker, some = self.askers[worker_id], random.sample(others, min(OTHERS, len(others)))
        asker.others = len(others)
        streams = [keys.queue(self._model, kind, other) for other in some for kind in CLASSES]
        claims = await self._claim(worker_id, plan, streams)
        if claims and not asker.watches:  # it has waited there for a look by chance
            asker.watchful = min(1.0, 2 * asker.chance)
        return claims

    async def wait(self, worker_id: str, timeout_s: float) -> bool:
        """Block until something new arrives on the streams of the last claim, or may be stolen; claims nothing.

        It reads without the group, from the tips that the last `claim` saw, so that quotas stay the claim's business.
        What arrives wakes everybody who waits. They look one after another, and who finds that it has been taken
        goes on waiting: else every sequence would cost a claim of each free worker. Of many free workers only some
        wait for what is for any of them, by lot; the others look when their time is over. Who wakes for nothing does
        so more seldom, who finds something when its time is over more often.
        """
        asker, own = self.askers[worker_id], self._own_streams(worker_id)
        streams = dict(asker.tips or dict.fromkeys(own, b"0-0"))
        others = (len(streams) - len(own)) // len(CLASSES)
        asker.watches = random.random() < asker.chance
        if not asker.watches:
            streams, others = {stream: streams[stream] for stream in own[:: len(own) // len(CLASSES)]}, 0
        until = time.monotonic() + (min(timeout_s, asker.steal_in_s) if asker.steal_in_s else timeout_s)
        while True:
            left_ms = max(1, int(1000 * (until - time.monotonic())))
            arrived = await self._redis.xread(streams, count=1, block=left_ms)
            if not arrived or not others:
                asker.watches = asker.watches or bool(arrived)
                return bool(arrived)
            await asyncio.sleep(random.random() * STAGGER_S * others)
            newest = {stream.decode(): entries[-1][0] for stream, entries in arrived}
            delivered = await self._delivered(list(newest))
            if any(_order(newest[stream]) > _order(delivered[stream]) for stream in newest):
                return True
            asker.watchful *= LESS_WATCHFUL
            streams |= delivered
            if time.monotonic() >= until:
                return False

    async def _delivered(self, streams: Sequence[str]) -> dict[Any, Any]:
        """The last entry of each stream that the consumer group has received."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for stream in streams:
                pipe.xinfo_groups(stream)
            answers = await pipe.execute(raise_on_error=False)
        ours = [
            [] if isinstance(groups, ResponseError) else [g for g in groups if g["name"] == keys.GROUP.encode()]
            for groups in answers
        ]
        return {stream: g[0]["last-delivered-id"] if g else b"0-0" for stream, g in zip(streams, ours, strict=True)}

    async def may_reap(self, worker_id: str) -> bool:
        """True if this worker should look for expired leases now; many workers need not look more often than a few.

        Each that asks every sixth of a lease keeps the looks at least half as far apart, and never farther than that.
        """
        turn = await self._redis.set(keys.reap_turn(self._model), worker_id, nx=True, px=max(1, self._lease_ms // 12))
        return bool(turn)

    async def reap(self, worker_id: str, limit: int) -> list[Claim]:
        """Take sequences whose lease has run out, from any stream of the model; claims up to `limit` of them.

        The others wait, handed back, for whoever claims next; suspects wait for an empty worker.
        """
        asker = self.askers[worker_id]
        if asker.held and time.monotonic() - asker.renewed_at > self._lease_ms / 2000:  # we are late, perhaps, not dead
            await self.renew(worker_id, asker.held)
        workers = list(dict.fromkeys([worker_id, *await members(self._redis, keys.workers(self._model))]))
        nobodys = ["", keys.HANDED_BACK, keys.SUSPECTS]
        for at in range(0, len(workers), WORKERS_AT_ONCE):
            part = workers[at : at + WORKERS_AT_ONCE]
            args: list[Argument] = [keys.GROUP, worker_id, self._lease_ms, self._prefix, self._max_deaths]
            args += [SUSPECT_AFTER, QUEUE_TTL_S, len(nobodys), *(keys.worker(self._model, name) for name in part)]
            streams = [keys.queue(self._model, kind, name) for name in (*nobodys, *part) for kind in CLASSES]
            reclaimed, poisoned = await _REAP(self._redis, [*self._fronts(), *streams], args)
            self.reclaimed += int(reclaimed)
            await self._sort_out(worker_id, poisoned)
            nobodys = []
        if limit <= 0:
            return []
        return await self._claim(worker_id, ClaimPlan(limit, limit, limit, limit, 2**53, False), [], handed_back=True)

    async def renew(self, worker_id: str, claims: Sequence[Claim]) -> list[Claim]:
        """Renew the leases of all sequences that a worker runs; returns the claims that are no longer its own."""
        names: list[str] = []
        args: list[Argument] = [keys.GROUP, worker_id]
        for claim in claims:
            names += [self._prefix + claim.spec.id, claim.stream]
            args += [claim.entry, claim.attempt]
        began = time.monotonic()
        lost = set(await _RENEW(self._redis, names, args)) if claims else set()
        asker = self.askers[worker_id]
        asker.renewed_at, asker.held = began, [claim for i, claim in enumerate(claims) if i not in lost]
        return [claim for i, claim in enumerate(claims) if i in lost]

    async def release(self, worker_id: str, claims: Sequence[Claim], *, failed: bool = False) -> None:
        """Give claims back; another worker can take them at once.

        None counts as a death, unless the engine has `failed` under them: one of them may be why.
        """
        args: list[Argument] = [keys.GROUP, worker_id, self._prefix, QUEUE_TTL_S, SUSPECT_AFTER]
        args.append(self._max_deaths if failed else "")
        for claim in claims:
            args += [claim.spec.id, claim.attempt, "1" if claim.spec.sequence_class == "batch" else ""]
        if claims:
            await _RELEASE(self._redis, self._fronts(), args)

    async def delete_worker_streams(self, worker_id: str) -> None:
        """Move what waits in a leaving worker's affinity streams to where any worker can claim it."""
        own = [*(keys.queue(self._model, kind, worker_id) for kind in CLASSES), keys.worker(self._model, worker_id)]
        await _FORWARD(self._redis, [*self._fronts()[:2], *own], [keys.GROUP, self._prefix, QUEUE_TTL_S])

    # -- looking

    async def depth(self) -> dict[SequenceClass, QueueDepth]:
        """Waiting and leased entries by class, over all streams."""
        workers = await members(self._redis, keys.workers(self._model))
        names = ["", keys.HANDED_BACK, keys.SUSPECTS, *workers]
        return {
            kind: QueueDepth(
                *await _DEPTH(self._redis, [keys.queue(self._model, kind, name) for name in names], [keys.GROUP])
            )
            for kind in CLASSES
        }

    async def is_asked(self) -> bool:
        """True if an interactive sequence waits or runs."""
        depth = (await self.depth())["interactive"]
        return bool(depth.waiting or depth.leased)

    async def unclaimed(self) -> dict[SequenceClass, int]:
        """Size of each class's backlog; the cost does not depend on the number of sequences."""
        places = ("", keys.HANDED_BACK, keys.SUSPECTS)
        streams = {kind: [keys.queue(self._model, kind, place) for place in places] for kind in CLASSES}
        return {kind: int((await _DEPTH(self._redis, streams[kind], [keys.GROUP]))[0]) for kind in CLASSES}

    # -- inside

    def _own_streams(self, worker_id: str) -> list[str]:
        places = (worker_id, keys.HANDED_BACK, "", keys.SUSPECTS)
        return [keys.queue(self._model, kind, place) for kind in CLASSES for place in places]

    def _fronts(self) -> list[str]:
        return [keys.queue(self._model, kind, place) for place in (keys.HANDED_BACK, keys.SUSPECTS) for kind in CLASSES]

    async def _claim(
        self, worker_id: str, plan: ClaimPlan, others: Sequence[str], *, handed_back: bool = False
    ) -> list[Claim]:
        asker, own = self.askers[worker_id], self._own_streams(worker_id)
        rest = [keys.suspect_turn(self._model), keys.dead_letters(self._model)]
        args: list[Argument] = [keys.GROUP, worker_id, plan.rows, plan.interactive_first, plan.batch_first]
        args += [plan.batch_max, plan.kv_tokens, "1" if plan.worker_is_empty else "", STEAL_AFTER_MS, self._prefix]
        args += [QUEUE_TTL_S, TURN_MS, "1" if handed_back else "", plan.kv_window, plan.kv_state]
        args += () if plan.worker_is_empty else asker.suspects
        tips, rows, steal_in_ms = await _CLAIM(self._redis, [*own, *rest, *others], args)
        if not handed_back:
            asker.tips, asker.steal_in_s = dict(zip([*own, *others], tips, strict=True)), steal_in_ms / 1000
        return await self._sort_out(worker_id, rows)

    async def _sort_out(self, worker_id: str, rows: list[list[Any]]) -> list[Claim]:
        """The claims that are to run; ends the others."""
        claims: list[Claim] = []
        for row in rows:
            try:
                claim = await self._settle(worker_id, row)
            except UnicodeDecodeError as error:  # names that are no text
                await self._bury(worker_id, row, f"unreadable: {error}")
                continue
            if claim is not None:
                claims.append(claim)
        asker = self.askers[worker_id]
        asker.held += claims
        asker.suspects = tuple(claim.spec.id for claim in claims if claim.suspect) or asker.suspects
        return claims

    async def _settle(self, worker_id: str, row: list[Any]) -> Claim | None:
        """The claim of one row, or None after its end was committed here."""
        stream, entry, seq, packed, attempt, api, job, verdict = row
        unreadable: UnreadableMessageError | None = None
        try:
            spec = decode_spec(packed)
        except UnreadableMessageError as error:
            spec, unreadable = self._settlement.unreadable(seq.decode(), job.decode()), error
        spec = msgspec.structs.replace(spec, id=seq.decode(), model=self._model, api=api.decode(), job=job.decode())
        claim = Claim(spec, stream.decode(), entry.decode(), int(attempt), verdict == b"suspect")
        if unreadable is not None:
            await self._settlement.give_up(worker_id, claim, unreadable.message, type(unreadable))
        elif verdict.startswith(b"poison "):
            deaths = int(verdict.split()[1])
            reason = f"its workers died {deaths} times, the last one while it ran alone"
            await self._settlement.give_up(worker_id, claim, reason)
        elif verdict in (b"cancelled", b"deadline"):
            await self._settlement.end(worker_id, claim, verdict.decode())
        else:
            return claim
        return None

    async def _bury(self, worker_id: str, row: list[Any], reason: str) -> None:
        stream, entry, seq, packed = row[:4]
        unusable = Unusable(
            stream.decode(), entry.decode(), seq.decode(errors="replace"), reason, worker_id, packed, keys.GROUP
        )
        await bury(self._redis, self._model, unusable)


def _order(entry: bytes) -> tuple[int, int]:
    milliseconds, _, number = entry.partition(b"-")
    return int(milliseconds), int(number)
