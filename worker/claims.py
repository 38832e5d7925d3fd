"""What a worker remembers of one claimed sequence, from claim to commit.

Tokens arrive as events from the engine. They go three ways: into frames for the api that streams them, into the
sequence's log in chunks, and, at the end, into the result that is committed. `attempt` of everything written is
the claim's, so a later owner's writes win.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace

import structlog
from redis.exceptions import RedisError

from shared.errors import EngineError, ParallmError
from shared.frames import Finish, TokenEvent
from shared.process.settings import WorkerSettings
from shared.redis.connection.faults import reason
from shared.redis.queue.sequence_queue import ClaimPlan, SequenceQueue
from shared.redis.tokens.writer import Commit
from shared.sequences import Claim, Timings
from shared.token_events import merged
from shared.trajectories import result_of
from worker.adapter_sync import AdapterSync
from worker.engine.messages import RowRequest
from worker.engine.scheduler import SchedulerState, Shares, plan_claims, plan_room


def now_ms() -> int:
    """Unix time in milliseconds."""
    return time.time_ns() // 1_000_000


@dataclass
class Running:
    """One claimed sequence: its events so far, and which of them the log has."""

    claim: Claim
    api: str
    started_ms: int
    first_token_ms: int = 0
    occupies_row: bool = True  # false once the engine has finished it and only the commit is left
    events: list[TokenEvent] = field(default_factory=list)
    logged: int = 0  # events[:logged] are in the log
    unlogged_tokens: int = 0
    last_event_s: float = 0.0  # monotonic; 0: the engine has not spoken of it yet

    @classmethod
    def after(cls, claim: Claim, prior: list[TokenEvent]) -> "Running":
        """A fresh claim, or one taken over with the `prior` tokens of earlier attempts.

        Prior events may have been read from an api's frame stream, which is short-lived, so they count as
        unlogged: the log gets them again under this attempt, and readers drop what they have.
        """
        for event in prior:
            event.attempt = claim.attempt
        tokens = sum(len(event.tokens) for event in prior)
        return cls(claim, claim.spec.api, now_ms(), events=list(prior), unlogged_tokens=tokens)

    @property
    def id(self) -> str:
        """The sequence's id."""
        return self.claim.spec.id

    def add(self, event: TokenEvent) -> None:
        """Take a new event of the engine."""
        if event.tokens and not self.first_token_ms:
            self.first_token_ms = now_ms()
        self.events.append(event)
        self.unlogged_tokens += len(event.tokens)

    def take_chunk(self) -> list[TokenEvent]:
        """The events that the log lacks, which from now on count as logged."""
        chunk = self.events[self.logged :]
        self.logged = len(self.events)
        self.unlogged_tokens = 0
        return merged(chunk)

    def log_anew(self) -> None:
        """The log has lost something: nothing of it counts."""
        self.logged = 0
        self.unlogged_tokens = sum(len(event.tokens) for event in self.events)

    def commit(self, worker_id: str) -> Commit:
        """The commit of a sequence whose last event carries `finish`."""
        spec = self.claim.spec
        timings = Timings(spec.enqueued_ms, self.started_ms, self.first_token_ms, now_ms())
        result = result_of(spec, self.claim.attempt, worker_id, self.events, timings)
        return Commit(claim=self.claim, result=result, last=self.take_chunk(), said=self.events)


NOTHING = ClaimPlan(0, 0, 0, 0, 0, worker_is_empty=False)


def claim_plan(rows: Iterable[Running], settings: WorkerSettings, kv_tokens: int, *, full: bool = False) -> ClaimPlan:
    """`kv_tokens`: positions of KV that this worker has in all. `full`: what to claim for rows that are made free."""
    interactive = batch = longest = 0
    for row in rows:
        if not row.occupies_row:
            continue
        longest = max(longest, row.claim.spec.kv_tokens)
        if row.claim.spec.sequence_class == "interactive":
            interactive += 1
        else:
            batch += 1
    plan = (plan_room if full else plan_claims)(
        SchedulerState(
            interactive_rows=interactive,
            batch_rows=batch,
            max_rows=settings.max_batch_size,
            kv_tokens_free=max(0, kv_tokens - (interactive + batch) * longest),  # the batch pads to its longest
        ),
        Shares(settings.interactive_share, settings.reserved_interactive_rows),
    )
    return ClaimPlan(
        rows=plan.rows,
        interactive_first=plan.interactive_first,
        batch_first=plan.batch_first,
        batch_max=plan.batch_max,
        kv_tokens=plan.kv_tokens,
        worker_is_empty=interactive + batch == 0,
    )


log = structlog.get_logger()


class Preparing:
    """Of one worker. `submit` gives requests to the engine; `submitted` hears of their rows, which may have changed."""

    def __init__(
        self,
        adapters: AdapterSync,
        running: dict[str, Running],
        submit: Callable[[list[RowRequest]], None],
        submitted: Callable[[list[Running]], Awaitable[None]],
        publish: Callable[[list[TokenEvent]], None],
    ) -> None:
        self._adapters = adapters
        self._running = running
        self._submit = submit
        self._submitted = submitted
        self._publish = publish
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, requests: list[RowRequest]) -> None:
        """Sequences to run; those of one adapter go together."""
        self._submit([request for request in requests if not request.spec.adapter])
        for adapter in {request.spec.adapter for request in requests} - {""}:
            alike = [request for request in requests if request.spec.adapter == adapter]
            task = asyncio.create_task(self._submit_together(alike))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _submit_together(self, requests: list[RowRequest]) -> None:
        prepared = [request for request in [await self._prepare(request) for request in requests] if request]
        self._submit(prepared)
        rows = [self._running.get(request.spec.id) for request in prepared]
        await self._submitted([row for row in rows if row is not None])

    async def _prepare(self, request: RowRequest) -> RowRequest | None:
        """The request with its adapter resolved; None when the sequence has ended or gone."""
        spec = request.spec
        while (row := self._running.get(spec.id)) is not None and row.claim.attempt == request.attempt:
            try:
                return replace(request, spec=await self._adapters.prepare(spec, request.prior))
            except (RedisError, OSError) as error:
                log.warning("worker.adapter_delayed", sequence=spec.id, error=reason(error))
                await asyncio.sleep(0.2)
            except Exception as error:
                known = error if isinstance(error, ParallmError) else EngineError(f"{type(error).__name__}: {error}")
                finish = Finish("error", error_code=known.code or "", error_message=known.message)
                position = sum(len(event.tokens) for event in request.prior)
                self._publish([TokenEvent(spec.id, request.attempt, position, [], [], finish=finish)])
                return None
        return None


class Room:
    """Of one worker; `cancel` ends a row in the engine."""

    def __init__(
        self, queue: SequenceQueue, worker_id: str, running: dict[str, Running], cancel: Callable[[str], None]
    ) -> None:
        self._queue = queue
        self._worker_id = worker_id
        self._running = running
        self._cancel = cancel

    def make(self, rows: int) -> list[Running]:
        """End this many rows of jobs in the engine, so that what is submitted next finds a place."""
        gone = victims(self._running.values(), rows)
        for row in gone:
            row.occupies_row = False  # what the engine still says of it is dropped
            self._cancel(row.id)
        return gone

    async def hand_back(self, rows: list[Running]) -> None:
        """Give them back; should Redis have gone, their leases run out."""
        try:
            await self._queue.release(self._worker_id, [row.claim for row in rows])
            log.info("worker.made_room", sequences=len(rows))
        finally:
            for row in rows:
                if self._running.get(row.id) is row:  # not a newer attempt, claimed meanwhile
                    del self._running[row.id]
                    self._cancel(row.id)  # should it have reached the engine only now, from its adapter


def victims(running: Iterable[Running], rows: int) -> list[Running]:
    """The rows of jobs that began last, at most `rows`."""
    jobs = [row for row in running if row.occupies_row and row.claim.spec.sequence_class == "batch" and _is_job(row)]
    return sorted(jobs, key=lambda row: -row.started_ms)[: max(0, rows)]


def _is_job(row: Running) -> bool:
    return bool(row.claim.spec.job) and not row.api  # nobody reads its tokens while they come
