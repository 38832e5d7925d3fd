"""A worker's side of the pause switch: stop claiming, bring the rows to rest, go on.

abort: sequences that a request waits for end with finish reason "abort" and what they have; those of jobs, which no
client reads yet, go back to the queue and continue after the resume. wait: rows finish. keep: rows stand still, with
their leases renewed.

Invariants. Claiming goes through `gate`, so that nothing comes in after the worker has said that it rests. At rest the
engine computes nothing, but loads adapters.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog

from shared.redis.processes.pause import PauseOrder, PauseSwitch
from worker.claims import Returns
from worker.engine.orders import Cancel, Freeze, Thaw
from worker.engine.thread import EngineThread
from worker.rows import ClaimedRow, ClaimedRows

log = structlog.get_logger()

LOOK_S = 2.0
SETTLE_LOOK_S = 0.05  # while rows still run


class Pause:
    """Carries out pause orders for one worker. `on_change` is called when the heartbeat changes."""

    def __init__(
        self,
        switch: PauseSwitch,
        engine: EngineThread,
        returns: Returns,
        rows: ClaimedRows,
        on_change: Callable[[], Awaitable[None]],
    ) -> None:
        self._switch = switch
        self._engine = engine
        self._returns = returns
        self._rows = rows
        self._on_change = on_change
        self._order: PauseOrder | None = None
        self._news = asyncio.Event()
        self.gate = asyncio.Lock()
        self.rests_under = ""  # id of the order under which everything has come to rest

    @property
    def on(self) -> bool:
        """True while claiming is off."""
        return self._order is not None

    @property
    def frozen(self) -> bool:
        """True while rows stand still."""
        return self._order is not None and self._order.mode != "wait"

    def poke(self) -> None:
        """Make `run` read the switch soon."""
        self._news.set()

    def aborts(self, row: ClaimedRow) -> bool:
        """True if a row that has just reached the engine must end at once."""
        return self._order is not None and self._order.mode == "abort" and not row.claim.spec.job

    async def run(self) -> None:
        """Obey the switch for ever."""
        while True:
            await self.look()
            settling = self.on and not self.rests_under
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_LOOK_S if settling else LOOK_S):
                    await self._news.wait()
            self._news.clear()

    async def look(self) -> None:
        """Read the switch and do what it says."""
        order = await self._switch.current()
        async with self.gate:
            if order is None:
                await self._resume()
            else:
                if order != self._order:
                    await self._begin(order)
                await self._settle(order)

    async def _begin(self, order: PauseOrder) -> None:
        log.info("worker.pausing", mode=order.mode, rows=len(self._rows))
        self._order, self.rests_under = order, ""
        if order.mode == "wait":
            self._engine.send(Thaw())  # an earlier pause may have kept rows; they finish now
            return
        self._engine.send(Freeze(order.clear_cache))
        if order.mode == "abort":
            rows = self._rows.occupying()
            for row in rows:
                if not row.claim.spec.job:
                    self._engine.send(Cancel(row.id, "abort"))
            if jobs := [row for row in rows if row.claim.spec.job]:
                await self._returns.hand_back(jobs)

    async def _settle(self, order: PauseOrder) -> None:
        """Come to rest when nothing is left to wait for."""
        if self.rests_under == order.id or (order.mode != "keep" and self._rows):
            return
        if order.mode == "wait":
            self._engine.send(Freeze(order.clear_cache))
        self.rests_under = order.id
        log.info("worker.paused", mode=order.mode, rows=len(self._rows))
        await self._on_change()

    async def _resume(self) -> None:
        if self._order is None:
            return
        self._order, self.rests_under = None, ""
        self._engine.send(Thaw())
        self._rows.changed.set()  # claiming begins again
        log.info("worker.resumed", rows=len(self._rows))
        await self._on_change()
