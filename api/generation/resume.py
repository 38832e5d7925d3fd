"""Streams that outlive their connection, and the api process that began them.

A request with `stream_options.include_event_ids` leaves its `RequestPlan` in Redis. A client with the last event id can
go on reading from any api process: the sequences are routed to it, what was missed is read from their logs.

Invariants. A resumable stream whose client is gone keeps running for GRACE_S; if no client has taken it up by then, in
this process or another, its sequences are cancelled.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
import structlog
from redis.exceptions import RedisError

from api.generation.choice import RequestPlan, stored_plan
from api.ring.ring import Ring
from shared.errors import NotFoundError
from shared.frames import TokenEvent
from shared.redis import keys
from shared.redis.connection.client import ask
from shared.redis.connection.faults import reason
from shared.redis.tokens.log import read_tokens

log = structlog.get_logger()

GRACE_S = float(keys.API_LEFT_S)  # likewise of the streams of an api that has stopped
GRACE_STEPS = 15
_reading: Counter[str] = Counter()  # connections of this process that read a resumable stream
_resuming: Counter[str] = Counter()  # requests to resume one, while they wait for Redis
lingering: set["asyncio.Task[None]"] = set()
left_last: dict[str, "asyncio.Task[None]"] = {}  # of each stream not read here: the task that waits for a reader


async def remember(ring: Ring, plan: RequestPlan, tenant: str) -> None:
    """Keep what another process needs to go on with this tenant's stream."""
    key, sequences = keys.request(plan.id), plan.sequences
    async with ring.redis.pipeline(transaction=False) as pipe:
        stored = {"kind": "chat" if sequences.chat else "completions", "model": sequences.template.model}
        pipe.hset(key, mapping={**stored, "plan": msgspec.json.encode(plan.for_storage()), "tenant": tenant})
        pipe.expire(key, keys.REQUEST_TTL_S)
        await pipe.execute()


async def take_over(ring: Ring, request_id: str) -> tuple[RequestPlan, list[list[TokenEvent]]]:
    """Route a stream's sequences to this process; its plan, and what each sequence has said, from its first token."""
    _resuming[request_id] += 1
    try:
        stored = await ask(ring.redis, "HGETALL", keys.request(request_id))
        if not stored:
            raise unknown_stream(request_id)
        plan = stored_plan(msgspec.json.decode(stored[b"plan"]))
        model, seqs = plan.sequences.template.model, plan.sequences.ids
        _linger(ring, plan, seqs)  # should this client leave before it reads
        before = await route(ring, model, seqs)
        history = [await read_tokens(ring.redis, model, seq, 0, before[seq]) for seq in seqs]
    finally:
        _resuming[request_id] -= 1
        if not _resuming[request_id]:
            del _resuming[request_id]
    log.info("api.resumed", request=request_id, sequences=len(seqs), before=sorted(set(before.values())))
    return plan, history


async def stream_owner(ring: Ring, request_id: str) -> str | None:
    """Who owns a stream; None when there is none."""
    plan, tenant = await ask(ring.redis, "HMGET", keys.request(request_id), "plan", "tenant")
    return None if plan is None else (tenant or b"").decode()


def unknown_stream(request_id: str) -> NotFoundError:
    """The error for a stream that is not there."""
    return NotFoundError(f"no resumable stream '{request_id}'; streams are stored for an hour", param="request_id")


async def route(ring: Ring, model: str, seqs: list[str]) -> dict[str, str]:
    """Have the frames of these sequences sent to this process; returns which process each went to before."""
    before = await _addressees(ring, model, seqs)
    if any(api is None for api in before.values()):
        raise NotFoundError("the stream's sequences are gone; they are stored for an hour after their end")
    await ring.queue(model).route(seqs, ring.api_id)
    return {seq: api or "" for seq, api in before.items()}


@contextlib.contextmanager
def reading(ring: Ring, plan: RequestPlan, leave: Callable[[], list[str]]) -> Iterator[None]:
    """Around the reading of a resumable stream; `leave` gives up reading and returns the unfinished sequences.

    Those are cancelled after GRACE_S, unless somebody has resumed by then.
    """
    _reading[plan.id] += 1
    left_last.pop(plan.id, None)
    try:
        yield
    finally:
        _reading[plan.id] -= 1
        if not _reading[plan.id]:
            del _reading[plan.id]
        if unfinished := leave():
            _linger(ring, plan, unfinished)


def stop_lingering() -> None:
    """At shutdown: leave the sequences to the process that resumes them."""
    for task in list(lingering):
        task.cancel()


def _linger(ring: Ring, plan: RequestPlan, unfinished: list[str]) -> None:
    """The time of grace begins with the last client that leaves: one that comes and goes is never away for long."""
    task = left_last[plan.id] = asyncio.create_task(_cancel_unless_resumed(ring, plan, unfinished))
    lingering.add(task)
    task.add_done_callback(lingering.discard)


async def time_of_grace() -> None:
    """GRACE_S in steps, of which a freeze of this process counts as one: its client cannot reach it meanwhile."""
    for _ in range(GRACE_STEPS):
        await asyncio.sleep(GRACE_S / GRACE_STEPS)


async def _cancel_unless_resumed(ring: Ring, plan: RequestPlan, unfinished: list[str]) -> None:
    await time_of_grace()
    while plan.id in _resuming:
        await time_of_grace()
    if left_last.get(plan.id) is not asyncio.current_task():
        return
    del left_last[plan.id]
    if plan.id in _reading:
        return
    model = plan.sequences.template.model
    try:
        addressees = await _addressees(ring, model, unfinished)
        ours = [seq for seq, api in addressees.items() if api == ring.api_id]
        if ours:
            await ring.queue(model).cancel(ours)
            log.info("api.cancelled", sequences=len(ours), first=ours[0], reason="not resumed")
    except (RedisError, OSError) as error:
        log.warning("api.cancel_failed", error=reason(error), sequences=len(unfinished))


async def _addressees(ring: Ring, model: str, seqs: list[str]) -> dict[str, str | None]:
    async with ring.redis.pipeline(transaction=False) as pipe:
        for seq in seqs:
            pipe.hget(keys.sequence(model, seq), "api")
        found = await pipe.execute()
    return {seq: None if api is None else api.decode() for seq, api in zip(seqs, found, strict=True)}
