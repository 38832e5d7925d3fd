"""How a run reacts when another process moves `latest` of its policy: a rollback, a switch, an upload.

Whoever does that has a reason, so it is never undone in silence: an alert says it, and then `on_foreign_version` holds.
**adopt** train on from their version · **pause** (default) wait, until a person says which (`ResumeOrder`) or makes the
run's version the latest again · **override** serve the run's own version again.

Invariants. While the run is paused nothing is learned and no version is moved; checkpoints can be saved. The run
samples its own versions by number, so that a move changes nothing of what is under way.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog
from redis.exceptions import RedisError

from shared.adapters import version_id
from shared.errors import ParallmError
from shared.redis.training.orders import Received
from shared.training import ForeignAction, Order, Refusal, ResumeAnswer, ResumeOrder
from trainer.runs.inbox import Moved
from trainer.runs.parts import Parts
from trainer.runs.served import Serving
from trainer.settings import TrainSettings
from trainer.state import RunState

log = structlog.get_logger()

CarryOut = Callable[[Received[Order]], Awaitable[object]]
LOOK_S = 1.0  # how often a run that waits looks at `latest`


@dataclass
class ForeignMoves:
    """Notices that another process has moved `latest`, and settles what follows."""

    settings: TrainSettings
    parts: Parts
    state: RunState
    serving: Serving
    held: str = ""  # why the run is paused

    async def look(self) -> Moved | None:
        """The move, if another process made it; None, too, when the ring cannot be reached."""
        latest = await self._latest()
        return None if latest is None or self.serving.owns(latest) else Moved(latest)

    async def _latest(self) -> int | None:
        """The latest version; None: the ring cannot be reached."""
        try:
            return await self.parts.ring.sink.latest_version()
        except (ParallmError, RedisError, OSError) as error:
            log.warning("train.latest_unknown", error=type(error).__name__)
            return None

    async def wait(self) -> Moved:
        """Return once another process has moved it."""
        while True:
            moved = await self.look()
            if moved is not None:
                return moved
            await asyncio.sleep(LOOK_S)

    async def settle(self, moved: Moved, stop: asyncio.Event, carry_out: CarryOut) -> None:
        """Alert, then follow the settings or a person's order; returns when the run may go on, or is stopped."""
        await self._alert(moved)
        action = self.settings.on_foreign_version
        if action != "pause":
            answer = await self._resume(action, moved)
            if isinstance(answer, ResumeAnswer):
                return
            await self.parts.ring.sink.alert("foreign_version", f"{answer.message}; the run is paused")
        self.held = self._why(moved)
        try:
            await self._wait_for_person(moved, stop, carry_out)
        finally:
            self.held = ""
        await self.parts.ring.board.show("waiting")

    async def _wait_for_person(self, moved: Moved, stop: asyncio.Event, carry_out: CarryOut) -> None:
        while not stop.is_set():
            await self.parts.ring.board.show("paused", problem=self.held)
            received = await self._next_order(stop)
            latest = await self._latest()
            ours = latest is not None and self.serving.owns(latest)
            if latest is not None and latest != moved.latest and not ours:
                moved = Moved(latest)
                self.held = self._why(moved)
                await self._alert(moved)
            if received is None:
                if ours:
                    log.info("train.resumed", because="the latest is the run's own again")
                    return
                continue
            if isinstance(received.body, ResumeOrder):
                answer = await self._resume(received.body.action, moved)
                await self.parts.ring.mailbox.answer(received, answer)
                if isinstance(answer, ResumeAnswer):
                    return
            else:
                await carry_out(received)

    async def _next_order(self, stop: asyncio.Event) -> Received[Order] | None:
        """The next order; None after a while, or when the run is stopped."""
        order = asyncio.create_task(self.parts.ring.mailbox.next())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((order, stopped), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (order, stopped):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await stopped
            await asyncio.gather(order, return_exceptions=True)
        return None if order.cancelled() else order.result()

    async def _resume(self, action: ForeignAction, moved: Moved) -> ResumeAnswer | Refusal:
        """Continue from their version, or serve ours again."""
        try:
            if action == "adopt":
                await self.serving.adopt(moved.latest)
            else:
                await self.serving.override(f"{self._named(moved)} is overridden by the trainer")
        except ParallmError as error:
            log.error("train.not_resumed", action=action, reason=error.message)
            return Refusal.of(error)
        log.warning("train.resumed", action=action, version=self.state.version)
        return ResumeAnswer(action, self.state.version)

    async def _alert(self, moved: Moved) -> None:
        does = {"adopt": "training goes on from it", "override": "the run's own is served again"}
        then = does.get(self.settings.on_foreign_version, "the run is paused")
        await self.parts.ring.sink.alert("foreign_version", f"{self._happened(moved)}; {then}")

    def _why(self, moved: Moved) -> str:
        own = version_id(self.settings.adapter, self.state.version)
        return (
            f"{self._happened(moved)}: POST /v1/training/resume with action adopt (train on from it) or override "
            f"(serve {own} again), or make {own} the latest"
        )

    def _happened(self, moved: Moved) -> str:
        own = version_id(self.settings.adapter, self.state.version)
        if not moved.latest:
            return f"somebody has deleted {self.settings.adapter}, of which this run serves {own}"
        if moved.latest < self.state.version:
            return (
                f"the latest is {self._named(moved)}, though this run serves {own}: somebody has chosen it, or Redis "
                "was set back to an earlier state"
            )
        return f"somebody has made {self._named(moved)} the latest, this run serves {own}"

    def _named(self, moved: Moved) -> str:
        return version_id(self.settings.adapter, moved.latest) if moved.latest else "nothing"
