"""Sequences, plans and events to test the queue and the frames with."""

from redis.asyncio import Redis

from shared.frames import Finish, TokenEvent
from shared.redis import keys
from shared.redis.processes.worker_registry import WorkerRegistry, WorkerState, WorkerStatus
from shared.redis.queue.sequence_queue import ClaimPlan, SequenceQueue
from shared.redis.tokens.writer import Commit, FrameWriter
from shared.sequences import Claim, SamplingParams, SequenceClass, SequenceResult, SequenceSpec, Timings, decode_result
from shared.trajectories import result_of

MODEL = "m"
LEASE_MS = 60_000  # no test waits for it: `die` makes leases old


def spec(
    seq: str,
    *,
    kind: SequenceClass = "interactive",
    group: str = "",
    kv: int = 10,
    api: str = "",
    job: str = "",
    deadline_ms: int = 0,
) -> SequenceSpec:
    """A sequence that needs `kv` positions."""
    return SequenceSpec(
        id=seq,
        model=MODEL,
        prompt_ids=(1, 2),
        sampling=SamplingParams(max_tokens=kv - 2, seed=1),
        sequence_class=kind,
        group=group,
        api=api,
        job=job,
        deadline_ms=deadline_ms,
    )


def specs(prefix: str, count: int, *, kind: SequenceClass = "interactive", group: str = "") -> list[SequenceSpec]:
    return [spec(f"{prefix}{i}", kind=kind, group=group) for i in range(count)]


def plan(
    rows: int,
    *,
    interactive_first: int | None = None,
    batch_first: int = 0,
    batch_max: int | None = None,
    kv: int = 1_000_000,
    empty: bool = False,
) -> ClaimPlan:
    """By default all rows are for whoever comes, interactive first."""
    first = rows if interactive_first is None else interactive_first
    return ClaimPlan(rows, first, batch_first, rows if batch_max is None else batch_max, kv, empty)


def queue(redis: Redis, *, lease_ms: int = LEASE_MS, bound: int = 0) -> SequenceQueue:
    return SequenceQueue(redis, MODEL, lease_ms=lease_ms, max_waiting={"interactive": bound} if bound else None)


async def beat(
    redis: Redis, worker: str, *, max_rows: int = 8, state: WorkerState = "ready", versions: tuple[str, ...] = ()
) -> None:
    """A worker says that it lives."""
    adapters = {name: int(number) for name, number in (version.split("@") for version in versions)}
    status = WorkerStatus(
        worker, MODEL, "h", 1, state, 0, max_rows, 0, 0, 1, 0.0, 0, 1, 1, adapters=adapters, versions=versions
    )
    await WorkerRegistry(redis).heartbeat(status)


async def die(redis: Redis, claims: list[Claim]) -> None:
    """The worker of these claims has renewed nothing for a lease; nor has any other one on their streams."""
    for stream in {claim.stream for claim in claims}:
        await make_old(redis, stream, LEASE_MS)


async def make_old(redis: Redis, stream: str, age_ms: int) -> None:
    """All leases on a stream were last renewed so long ago."""
    for lease in await redis.xpending_range(stream, keys.GROUP, "-", "+", 100):
        await redis.xclaim(stream, keys.GROUP, lease["consumer"], 0, [lease["message_id"]], idle=age_ms, justid=True)


async def end_leases(redis: Redis, name: str) -> None:
    """Whoever had entries of a list of what is due has died a while ago."""
    for entry in await redis.zrange(keys.due(name), 0, -1):
        await redis.zadd(keys.due(name), {entry: 1}, xx=True)


def ids(claims: list[Claim]) -> list[str]:
    return [claim.spec.id for claim in claims]


def tokens(seq: str, start: int, count: int, *, attempt: int = 1, finish: Finish | None = None) -> TokenEvent:
    """Tokens whose value is 1000 times the attempt plus the position."""
    values = [1000 * attempt + position for position in range(start, start + count)]
    return TokenEvent(seq, attempt, start, values, [-0.5] * count, finish=finish)


def ending(claim: Claim, events: list[TokenEvent], worker: str = "w1") -> Commit:
    """The commit of a claim; the last of `events` carries the finish."""
    return Commit(claim, result_of(claim.spec, claim.attempt, worker, events, Timings()), events)


def stop(seq: str, position: int = 0, attempt: int = 1) -> TokenEvent:
    return TokenEvent(seq, attempt, position, [], [], finish=Finish("stop"))


async def commit(redis: Redis, worker: str, claim: Claim) -> bool:
    """End a claim as a worker does, without tokens."""
    event = stop(claim.spec.id, attempt=claim.attempt)
    (ours,) = await FrameWriter(redis, MODEL, worker).write({}, {}, [ending(claim, [event], worker)])
    return ours


async def state(redis: Redis, seq: str) -> str:
    found = await redis.hget(keys.sequence(MODEL, seq), "state")
    return found.decode() if found else ""


async def gathered(redis: Redis, job: str) -> list[SequenceResult]:
    """What the job runner would find."""
    return [decode_result(fields[b"result"]) for _, fields in await redis.xrange(keys.finished(MODEL, job))]
