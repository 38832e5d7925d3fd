"""Claimed sequences that want an adapter: have it at hand, then hand them to the engine; the others do not wait.

Invariant. A sequence in `running` under our attempt ends up in the engine or gets its finish here, exactly one of them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog
from redis.exceptions import RedisError

from shared.errors import EngineError, ParallmError
from shared.frames import Finish, TokenEvent
from shared.redis.faults import reason
from worker.adapter_sync import AdapterSync
from worker.engine.thread import RowRequest
from worker.running import Running

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
