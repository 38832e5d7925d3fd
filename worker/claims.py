"""How claimed sequences come to a worker's engine, with their adapters, images and others' KV, and how they go back."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

import structlog
from redis.exceptions import RedisError

from shared.errors import EngineError, ParallmError
from shared.frames import TokenEvent
from shared.redis.connection.faults import reason
from shared.redis.queue.sequence_queue import SequenceQueue
from worker.adapters.sync import AdapterSync
from worker.engine.messages import RowRequest
from worker.engine.orders import Cancel, Submit
from worker.peers.exchange import KvExchange
from worker.pictures import SequencePictures
from worker.publisher import TokenPublisher
from worker.rows import ClaimedRow, ClaimedRows

log = structlog.get_logger()

LAST_WORDS_S = 3.0  # for each of them, to a Redis that may be away
SET_ASIDE_S = 3.0  # for an engine that may be in the middle of a step


class Preparing:
    """Fetches what sequences need and submits them. `submitted` is called with their rows, which may have changed."""

    def __init__(
        self,
        adapters: AdapterSync,
        rows: ClaimedRows,
        send: Callable[[Submit], None],
        submitted: Callable[[list[ClaimedRow]], Awaitable[None]],
        publish: Callable[[list[TokenEvent]], None],
        peers: KvExchange,
        pictures: SequencePictures,
    ) -> None:
        self._peers = peers
        self._pictures = pictures
        self._adapters = adapters
        self._rows = rows
        self._send = send
        self._submitted = submitted
        self._publish = publish
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, requests: list[RowRequest]) -> None:
        """Sequences to run; those of one adapter go together, those of one prompt whose KV another worker has, and
        those of the same images."""
        holders = await self._peers.holders(requests)
        late = {request.spec.id for request in requests if request.spec.adapter or request.spec.images} | holders.keys()
        self._send(Submit([request for request in requests if request.spec.id not in late]))
        alike: dict[tuple[str, str, object], list[RowRequest]] = {}
        for request in requests:
            spec, holder = request.spec, holders.get(request.spec.id, "")
            if spec.id in late:
                prompt: object = (spec.prompt_ids, spec.id if request.prior else "") if holder else ()
                prompt = (spec.images, prompt)
                alike.setdefault((spec.adapter, holder, prompt), []).append(request)
        for (_, holder, _), together in alike.items():
            task = asyncio.create_task(self._submit_together(together, holder))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """End the processes that read images."""
        self._pictures.close()

    async def _submit_together(self, requests: list[RowRequest], holder: str) -> None:
        prepared = [request for request in [await self._prepare(request) for request in requests] if request]
        if holder and prepared:
            await self._peers.fetch(prepared[0], holder, lambda: any(map(self._is_ours, prepared)))
            prepared = list(filter(self._is_ours, prepared))
        self._send(Submit(prepared))
        rows = [self._rows.get(request.spec.id) for request in prepared]
        await self._submitted([row for row in rows if row is not None])

    def _is_ours(self, request: RowRequest) -> bool:
        """True while the request's attempt is still claimed here."""
        return self._rows.attempt(request.spec.id, request.attempt) is not None

    async def _prepare(self, request: RowRequest) -> RowRequest | None:
        """The request with its adapter resolved; None when the sequence has ended or gone."""
        spec = request.spec
        while self._is_ours(request):
            try:
                pictures = await self._pictures.of(spec)
                return replace(request, spec=await self._adapters.prepare(spec, request.prior), pictures=pictures)
            except (RedisError, OSError) as error:
                log.warning("worker.sequence_delayed", sequence=spec.id, error=reason(error))
                await asyncio.sleep(0.2)
            except Exception as error:
                known = error if isinstance(error, ParallmError) else EngineError(f"{type(error).__name__}: {error}")
                self._publish([request.refused(known)])
                return None
        return None


class RowsOwner(Protocol):
    """The part of `EngineThread` that gives rows back."""

    def set_aside(self, seq_ids: list[str]) -> Future[None]: ...

    def send(self, order: Cancel) -> None: ...


class Returns:
    """How rows of one worker go back to the queue before their end.

    The engine lets them go with their KV in its prefix cache, so that a worker that continues them need not compute it.
    """

    def __init__(
        self,
        queue: SequenceQueue,
        worker_id: str,
        rows: ClaimedRows,
        publisher: TokenPublisher,
        engine: RowsOwner,
    ) -> None:
        self._queue = queue
        self._worker_id = worker_id
        self._rows = rows
        self._publisher = publisher
        self._engine = engine

    def make_room(self, rows: int) -> list[ClaimedRow]:
        """Have the engine let go of this many rows of jobs, so that what is submitted next finds a place."""
        gone = victims(self._rows, rows)
        if gone:
            self._engine.set_aside([row.id for row in gone])
        return gone

    async def hand_back(self, rows: list[ClaimedRow], *, failed: bool = False) -> None:
        """Give them back with all their tokens in the log, but for those that end meanwhile.

        Should Redis have gone, their leases run out. `failed`: the engine has, over these rows.
        """
        if not failed:
            await self._set_aside(rows)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._publisher.log_all(rows)
        rows = [row for row in rows if row.occupies_row]
        for row in rows:
            row.occupies_row = False  # what the engine still says of it is dropped
        try:
            await self._queue.release(self._worker_id, [row.claim for row in rows], failed=failed)
        finally:
            for row in rows:
                if self._rows.leave(row.claim):
                    self._engine.send(Cancel(row.id))  # should it have reached the engine only now, from its adapter

    async def _set_aside(self, rows: list[ClaimedRow]) -> None:
        """Return when the engine has let go of these rows, and everything that it has said of them is here."""
        try:
            async with asyncio.timeout(SET_ASIDE_S):
                ours = [row.id for row in rows if self._rows.get(row.id) is row]
                await asyncio.wrap_future(self._engine.set_aside(ours))
        except Exception as error:  # they are computed again, then
            log.warning("worker.not_set_aside", sequences=len(rows), error=repr(error))


def victims(rows: Iterable[ClaimedRow], most: int) -> list[ClaimedRow]:
    """The rows of jobs that began last, at most `most`."""
    jobs = [row for row in rows if row.occupies_row and row.claim.spec.sequence_class == "batch" and _is_job(row)]
    return sorted(jobs, key=lambda row: -row.started_ms)[: max(0, most)]


def youngest(rows: Iterable[ClaimedRow], most: int) -> list[ClaimedRow]:
    """Rows to give up when memory is short, at most `most`: batch work first, and of each class what began last."""
    held = [row for row in rows if row.occupies_row]
    order = sorted(held, key=lambda row: (row.claim.spec.sequence_class == "interactive", -row.started_ms))
    return order[: max(0, most)]


def _is_job(row: ClaimedRow) -> bool:
    return bool(row.claim.spec.job) and not row.api  # its tokens are not read as they come
