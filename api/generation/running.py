"""One request's sequences in flight: enqueued, read, and cancelled as soon as no client waits for them.

Invariants. The feed is open before anything is enqueued, so no token is missed. A sequence that has not finished when
the request ends, however it ends, is cancelled. The adapter version that a request was admitted with cannot be deleted
while it lasts.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any

import structlog
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from api.callers.caller import asker, calling, while_wanted
from api.generation.sequences import Sequences
from api.generation.tracing import WorkSpan
from api.ring.ring import Ring
from shared.errors import (
    DeadlineExceededError,
    LateFirstTokenError,
    ParallmError,
    QueueFullError,
    RequestCancelledError,
    ServiceUnavailableError,
    from_code,
)
from shared.frames import Finish, TokenEvent
from shared.redis.connection.faults import reason
from shared.redis.queue.named_requests import NamedRequests
from shared.redis.queue.sequence_queue import UNTIMED
from shared.redis.tokens.feed import LOST, TokenFeed
from shared.sequences import SequenceClass, SequenceSpec

log = structlog.get_logger()

PIN_S = 3600.0  # of the adapter version of a request without a deadline, at most
DEADLINE_GRACE_S = 2.0  # the worker enforces the deadline; without a worker we do, this much later
_TOO_LATE = "the deadline passed before the request was complete"
SILENCE_S = 10.0  # without an event, after which `batches` yields an empty batch: clients are to hear something
LOOK_S = 1.0  # the same while the model is loaded
PART = 256  # events that are handed on at once
LARGE_SIZE = 4096  # of events: from here on writing them takes some 10 ms
_settling: set["asyncio.Task[None]"] = set()

Events = list[tuple[int, TokenEvent]]  # (index of the sequence, event)


class Generation:
    """The sequences of one request while their tokens come in."""

    def __init__(self, ring: Ring, model: str, seqs: list[str], deadline_ms: int) -> None:
        self._ring = ring
        self._model = model
        self._deadline_ms = deadline_ms
        self._first_deadline_ms = 0  # until an event has come
        self._kind: SequenceClass = "interactive"
        self._seqs = seqs
        self._history: Events = []
        self._was_served = True  # a worker was there when it was enqueued
        self.waiting_for = ""  # what it waits for while no worker serves its model, such as "loading 43%"
        self._places: list[int] = []  # of a resumed request: where the sequences of the feed stand among all
        self.unfinished = dict.fromkeys(seqs)
        self._feed: TokenFeed | None = None
        self._specs: dict[str, SequenceSpec] = {}  # of a request that began here
        self._span: WorkSpan | None = None  # while it is traced
        self._releases: list[Callable[[], Awaitable[object]]] = []  # of what is held for as long as the request lasts
        self._records: list[Callable[[], Awaitable[object]]] = []  # each writes what Redis holds besides the sequences

    @classmethod
    async def start(
        cls, ring: Ring, sequences: Sequences, record: Callable[[], Awaitable[object]] | None = None
    ) -> "Generation":
        """Open the feed and enqueue, in the class of the caller's key. `record` writes what Redis is to hold of the
        request besides its sequences: before they are enqueued, and again if Redis has lost them.

        QueueFullError when too much is waiting, ServiceUnavailableError when no worker has memory left, PausedError.
        """
        model = sequences.template.model
        structlog.contextvars.bind_contextvars(
            work=sequences.template.id
        )  # the ids of sequences in all logs begin with it
        async with ring.in_time():
            await ring.check_pause()
            await ring.check_memory(model)
        key = calling.get()
        kind: SequenceClass = "interactive" if key is None else key.sequence_class
        span = WorkSpan.begin(sequences)
        trace = span.traceparent if span is not None else ""
        specs = sequences.specs(ring.api_id, ring.settings.first_token_timeout_s, kind, trace, asker().tenant)
        generation = cls(ring, model, [spec.id for spec in specs], sequences.template.deadline_ms)
        generation._span, generation._kind = span, kind
        generation._was_served = bool(ring.serving(model))
        generation._first_deadline_ms = specs[0].first_token_deadline_ms if specs else 0
        ring.tally.histogram("vllm:request_params_n", model).observe(sequences.n)
        generation._feed = ring.frames.open(model, generation._seqs)
        try:
            async with ring.in_time():
                await generation._pin(sequences.template)
                generation._records += [] if record is None else [record]
                generation._note_name(sequences)
                await generation._record()
                await generation._enqueue(specs)
            ring.splits.sent(sequences.split_to)
            generation._specs = {spec.id: spec for spec in specs}
            generation._feed.on_lost = generation._lost
        except BaseException as error:
            generation._note(type(error).__name__)
            if isinstance(error, QueueFullError) and not isinstance(error, LateFirstTokenError):
                error.retry_after_s = ring.load.note_full(ring.full_name(model), kind, ring.queue_bound(kind))
            if isinstance(error, ParallmError) and not isinstance(error.__cause__, RedisConnectionError | OSError):
                generation.unfinished = {}  # refused as a whole; any other error may have come after the enqueueing
            generation.close()
            raise
        return generation

    @classmethod
    def resume(
        cls, ring: Ring, model: str, seqs: list[str], history: list[list[TokenEvent]], deadline_ms: int
    ) -> "Generation":
        """Go on with sequences that run already; `history` holds what each has said so far, from its first token."""
        generation = cls(ring, model, seqs, deadline_ms)
        generation._history = [(index, event) for index, events in enumerate(history) for event in events]
        places = [i for i, events in enumerate(history) if not events or events[-1].finish is None]
        start = [history[i][-1].end if history[i] else 0 for i in places]
        generation._places = places
        attempts = [history[i][-1].attempt if history[i] else 0 for i in places]
        generation._feed = ring.frames.open(model, [seqs[i] for i in places], start, attempts)
        generation._feed.on_lost = generation._lost
        return generation

    async def batches(self) -> AsyncIterator[Events]:
        """All events that are ready, again and again until every sequence has finished; none of them after a silence.

        Raises what ended a sequence before its time: its deadline, a cancellation, an error of the engine, a model that
        no host can load.
        """
        events, self._history = self._history, []
        while events or self.unfinished:
            events = self._checked(events or await self._next())
            if not events and self.unfinished:
                yield events
            for at, part in enumerate(_parts(events)):
                if at:  # of a slow client, or of one that has come back: others' tokens go in between
                    await asyncio.sleep(0)
                yield part
            events = []

    def _checked(self, events: Events) -> Events:
        span = self._span
        for _, event in events:
            if span is not None:
                span.heard(event)
            if event.finish is not None:
                self.unfinished.pop(event.seq, None)
                raise_failure(event.finish)
        return events

    async def _next(self) -> Events:
        """The next events; none after a silence, when it has been found out what is waited for."""
        assert self._feed is not None, "read before start"
        deadlines = [at for at in (self._deadline_ms, self._first_deadline_ms) if at]
        left_s = min(deadlines) / 1000 - time.time() + DEADLINE_GRACE_S if deadlines else math.inf
        is_cold = self.waiting_for or not self._ring.serving(self._model)
        silence_s = LOOK_S if is_cold else SILENCE_S
        try:
            async with asyncio.timeout(min(left_s, silence_s)):
                events = await self._feed.next()
        except TimeoutError:
            if left_s > silence_s:
                self.waiting_for = await self._ring.waiting_for(self._model, was_served=self._was_served)
                return []
            self._note("deadline")
            self._count_first("missed")
            raise DeadlineExceededError(_TOO_LATE) from None
        self.waiting_for = ""
        if self._first_deadline_ms:
            in_time = not _expired(events) and time.time() * 1000 <= self._first_deadline_ms
            self._count_first("kept" if in_time else "missed")
        return self._placed(events)

    @property
    def comment(self) -> bytes:
        """SSE comment about what is waited for; b"": nothing."""
        return b": %s\n\n" % self.waiting_for.encode() if self.waiting_for else b""

    def _placed(self, events: Events) -> Events:
        return [(self._places[i], event) for i, event in events] if self._places else events

    def leave(self) -> list[str]:
        """Stop reading and let the sequences run on; returns those that have not finished."""
        if self._feed is not None:
            self._feed.close()
        unfinished, self.unfinished = list(self.unfinished), {}
        return unfinished

    def close(self) -> None:
        """The request is over: what has not finished is cancelled, without waiting for Redis."""
        if unfinished := self.leave():
            _settle(self._cancel(unfinished))
            self._note("cancelled")
        if self._span is not None:
            self._span.end()
        while self._releases:
            _settle(_released(self._releases.pop()))

    def _note(self, failure: str) -> None:
        """For the span, if there is one: what kind of failure it was."""
        if self._span is not None:
            self._span.failed(failure)

    async def _enqueue(self, specs: list[SequenceSpec]) -> None:
        """Into the queue, unless the first token would come too late there: LateFirstTokenError."""
        ring, model, kind = self._ring, self._model, self._kind
        prefer, forecast = await ring.affinity.preferred(specs), ring.forecast(model, kind)
        tokens = max((len(spec.prompt_ids) for spec in specs), default=0)
        deadlines = [at for spec in specs[:1] for at in (spec.deadline_ms, spec.first_token_deadline_ms) if at]
        within_s, timely = min(deadlines, default=0) / 1000 - time.time(), UNTIMED
        if forecast is not None and deadlines:
            timely = ring.first_tokens.places(forecast, model, kind, tokens, within_s)
        try:
            await ring.queue(model).enqueue(specs, prefer=prefer, timely=timely)
        except LateFirstTokenError as error:
            assert forecast is not None, "only what is timed comes too late"
            too_many = error.waiting + len(specs) - timely.places
            free = ring.first_tokens.reserved_share(model, kind)
            error.retry_after_s = ring.first_tokens.refused(forecast, model, kind, too_many, timely.places)
            mean = ring.first_tokens.prompt_tokens(model, kind)
            soonest_s = forecast.seconds(error.waiting + len(specs), mean, tokens)
            error.message = (
                f"{error.waiting} {kind} sequences of model '{model}' are waiting: the first token would come in about "
                f"{soonest_s:.1f} s. The deadline is {max(0.0, within_s):.1f} s (deadline_s, --first-token-timeout-s), "
                f"and {free:.0%} of it is reserved for errors of the prediction; try again in {error.retry_after_s} s"
            )
            self._count_first("refused")
            raise
        ring.first_tokens.let_in(model, kind, tokens)

    def _count_first(self, outcome: str) -> None:
        """Counts, once a request, how the deadline of its first token ended."""
        if self._first_deadline_ms:
            name = "mlx_parallm_first_token_deadlines_total"
            self._ring.tally.counter(name, self._model, self._kind, outcome).add()
            self._first_deadline_ms = 0

    async def _pin(self, spec: SequenceSpec) -> None:
        """Keep the version for as long as the request may last; UnknownAdapterError when it has gone by now."""
        if "@" not in spec.adapter:
            return
        left_s = spec.deadline_ms / 1000 - time.time() + DEADLINE_GRACE_S if spec.deadline_ms else PIN_S
        await self._ring.adapters.pin_all(spec.adapter, spec.id, left_s)
        self._releases.append(lambda: self._ring.adapters.unpin_all(spec.adapter, spec.id))

    def _note_name(self, sequences: Sequences) -> None:
        """Let POST /abort_requests find it."""
        if sequences.name:
            names, noted = NamedRequests(self._ring.redis), (owner(), sequences.name, self._model, sequences.id)
            self._releases.append(lambda: names.remove(*noted))
            self._records.append(lambda: names.add(*noted))

    async def _record(self) -> None:
        for write in self._records:
            await write()

    def _lost(self, seq: str, position: int) -> None:
        """Redis has come back without a sequence: enqueue it again, if it will say again what its client has seen."""
        spec = self._specs.get(seq)
        says_the_same = spec is not None and (position == 0 or not spec.adapter or "@" in spec.adapter)
        if spec is None or not says_the_same:
            log.warning("api.sequence_lost", sequence=seq, position=position)
            if self._feed is not None:
                self._feed.fail(ServiceUnavailableError(LOST))
            return
        log.warning("api.enqueued_anew", sequence=seq, position=position)
        _settle(self._enqueue_anew(spec))

    async def _enqueue_anew(self, spec: SequenceSpec) -> None:
        with contextlib.suppress(RedisError, OSError, QueueFullError):  # still lost: it will be asked for again
            await self._ring.frames.announce()  # first: a sequence without a living reader is cancelled
            await self._record()
            await self._ring.queue(self._model).enqueue([spec])

    async def _cancel(self, seqs: list[str]) -> None:
        try:
            await self._ring.queue(self._model).cancel(seqs)
            log.info("api.cancelled", sequences=len(seqs), first=seqs[0])
        except (RedisError, OSError) as error:
            log.warning("api.cancel_failed", error=reason(error), sequences=len(seqs))


def owner() -> str:
    """Whose names those of this request are: the tenant's, else the API key's; "" where none is wanted."""
    key = calling.get()
    return asker().tenant or ("" if key is None else key.name)


def _settle(work: Coroutine[Any, Any, None]) -> None:
    """Run it in the background."""
    task = asyncio.create_task(work)
    _settling.add(task)
    task.add_done_callback(_settling.discard)


async def _released(release: Callable[[], Awaitable[object]]) -> None:
    with contextlib.suppress(RedisError, OSError):  # it ends by itself
        await release()


async def settled() -> None:
    """Wait for cancellations that are under way; at shutdown."""
    if _settling:
        await asyncio.wait(_settling, timeout=2)


def raise_failure(finish: Finish) -> None:
    """Raise the error of a sequence that did not end by itself."""
    if finish.reason == "deadline":
        raise DeadlineExceededError(_TOO_LATE)
    if finish.reason == "cancelled":
        raise RequestCancelledError("the request was cancelled")
    if finish.reason == "error":
        raise from_code(finish.error_code, finish.error_message or "the engine failed on this sequence")


def _expired(events: Events) -> bool:
    """True if a sequence has ended without a token because it was too late."""
    return any(event.finish is not None and event.finish.reason == "deadline" for _, event in events)


def _parts(events: Events) -> Iterator[Events]:
    """Neighbours together, as far as it takes no time to write them."""
    part: Events = []
    size = 0
    for each in events:
        size += each[1].size
        if part and (size > LARGE_SIZE or len(part) == PART):
            yield part
            part, size = [], each[1].size
        part.append(each)
    if part:
        yield part


def by_choice(events: Events) -> Iterator[tuple[int, list[TokenEvent]]]:
    """Events grouped by sequence, in the order in which the sequences first appear."""
    if len(events) == 1:
        yield events[0][0], [events[0][1]]
        return
    grouped: dict[int, list[TokenEvent]] = {}
    for index, event in events:
        grouped.setdefault(index, []).append(event)
    yield from grouped.items()


async def gather_all(ring: Ring, sequences: Sequences) -> list[list[TokenEvent]]:
    """Enqueue the sequences and wait for all events of each sequence; RequestCancelledError when the client leaves."""
    generation = await Generation.start(ring, sequences)
    events: list[list[TokenEvent]] = [[] for _ in range(len(sequences))]

    async def gather() -> None:
        async for batch in generation.batches():
            for index, event in batch:
                events[index].append(event)

    try:
        await while_wanted(gather())
    finally:
        generation.close()
    return events
