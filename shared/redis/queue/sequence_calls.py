"""Sequences that this process enqueues and waits for: results are gathered under its own name, as a job's are.

Invariants. A call that is cancelled cancels its sequences. Ids are the caller's: asking again under the same ids
changes nothing, so what Redis may have lost in a crash is simply enqueued again.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.errors import QueueFullError, UnreadableMessageError
from shared.redis import keys
from shared.redis.connection.background_reader import BackgroundReader
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.redis.queue.affinity import Affinity
from shared.redis.queue.sequence_queue import SequenceQueue
from shared.sequences import SequenceResult, SequenceSpec, decode_result

AT_ONCE = 256
WAIT_MS = 1000
ASK_AGAIN_S = 0.1  # while the queue is full
REPAIR_AFTER_S = 15.0  # without a result


class SequenceCalls(BackgroundReader):
    """Calls to the workers of one model. `owner` is a name that no other process uses."""

    def __init__(self, redis: Redis, model: str, owner: str) -> None:
        self.owner = owner
        self._redis = redis
        self._queue = SequenceQueue(redis, model)
        self._affinity = Affinity(redis, WorkerRegistry(redis))
        self._stream = keys.finished(model, owner)
        self._last = "0-0"
        self._waiting: dict[str, asyncio.Future[SequenceResult]] = {}

    async def __aenter__(self) -> Self:
        # Unread messages to an earlier process of this name belong to calls that have no waiter any more.
        await self._redis.delete(self._stream)
        return await super().__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        with contextlib.suppress(RedisError, OSError):
            await self._queue.cancel(list(self._waiting), gathered=False)
            await self._redis.delete(self._stream)

    async def call(self, specs: Sequence[SequenceSpec], *, prefer: Sequence[str] = ()) -> list[SequenceResult]:
        """The results of sequences of one class and one beginning, in order; a full queue is waited for.

        `prefer`: ids of workers; default: those that know the beginning.
        UnreadableMessageError when a worker of another version answers.
        """
        assert all(spec.job == self.owner for spec in specs), "results go to the owner"
        loop = asyncio.get_running_loop()
        futures = {spec.id: self._waiting.setdefault(spec.id, loop.create_future()) for spec in specs}
        try:
            await self._enqueue(specs, prefer)
            while True:
                done, missing = await asyncio.wait(
                    futures.values(), timeout=REPAIR_AFTER_S, return_when=asyncio.FIRST_EXCEPTION
                )
                if not missing or any(future.exception() for future in done):
                    return [futures[spec.id].result() for spec in specs if futures[spec.id].done()]
                with contextlib.suppress(RedisError, OSError):
                    await self._enqueue([spec for spec in specs if futures[spec.id] in missing], prefer)
        except asyncio.CancelledError:
            with contextlib.suppress(RedisError, OSError):
                await asyncio.shield(self._queue.cancel([spec.id for spec in specs]))
            raise
        finally:
            for spec in specs:
                self._waiting.pop(spec.id, None)

    async def _enqueue(self, specs: Sequence[SequenceSpec], prefer: Sequence[str]) -> None:
        while True:
            try:
                await self._queue.enqueue(specs, prefer=prefer or await self._affinity.preferred(specs))
                return
            except QueueFullError:
                await asyncio.sleep(ASK_AGAIN_S)

    async def _read_round(self) -> None:
        streams = await self._redis.xread({self._stream: self._last}, count=AT_ONCE, block=WAIT_MS)
        for _, entries in streams:
            for entry, fields in entries:
                self._last = entry.decode()
                waiting = self._waiting.get(fields.get(b"id", b"").decode(errors="replace"))
                if waiting is None or waiting.done():
                    continue
                try:
                    waiting.set_result(decode_result(fields.get(b"result", b"")))
                except UnreadableMessageError as error:  # garbage, or another version's
                    waiting.set_exception(error)
            await self._redis.xdel(self._stream, *(entry for entry, _ in entries))
