"""What a run does when somebody else moves `latest` of the policy that it trains: a rollback, a switch, an upload.

Whoever does that has a reason, so it is never undone in silence: an alert says it, and then `on_foreign_version` holds.
**adopt** train on from their version · **pause** (default) wait, until a person says which (`ResumeOrder`) or makes the
run's version the latest again · **override** serve the run's own version again.

Invariants. While the run is paused nothing is learned and no version is moved; checkpoints can be saved. The run
samples its own versions by number, so that a move changes nothing of what is under way.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog
from redis.exceptions import RedisError

from shared.adapters import version_id
from shared.errors import ParallmError
from shared.training import Answer, ForeignAction, ResumeAnswer, ResumeOrder
from trainer.inbox import Moved
from trainer.seams import Letter, Parts, refusal
from trainer.settings import TrainSettings
from trainer.state import RunState
from trainer.versions.served import Serving

log = structlog.get_logger()

LOOK_S = 1.0  # how often a run that waits looks at `latest`


class ForeignMoves:
    """Sees them, and settles what follows."""

    def __init__(self, settings: TrainSettings, parts: Parts, state: RunState, serving: Serving) -> None:
        self._settings = settings
        self._parts = parts
        self._state = state
        self._serving = serving
        self.held = ""  # why the run is paused

    async def look(self) -> Moved | None:
        """The move, if somebody else has made the latest what it is; a ring that is away says nothing."""
        latest = await self._latest()
        return None if latest is None or self._serving.owns(latest) else Moved(latest)

    async def _latest(self) -> int | None:
        """The latest version; None: nobody can say."""
        try:
            return await self._parts.sink.latest_version()
        except (ParallmError, RedisError, OSError) as error:
            log.warning("train.latest_unknown", error=type(error).__name__)
            return None

    async def wait(self) -> Moved:
        """Until there is one."""
        while True:
            moved = await self.look()
            if moved is not None:
                return moved
            await asyncio.sleep(LOOK_S)

    async def settle(self, moved: Moved, stop: asyncio.Event, carry_out: Callable[[Letter], Awaitable[object]]) -> None:
        """Alert, then do what the settings or a person say; returns when the run may go on, or is stopped."""
        await self._alert(moved)
        action = self._settings.on_foreign_version
        if action != "pause":
            answer = await self._resume(action, moved)
            if isinstance(answer, ResumeAnswer):
                return
            await self._parts.sink.alert("foreign_version", f"{answer}; the run is paused")
        self.held = self._why(moved)
        try:
            await self._wait_for_person(moved, stop, carry_out)
        finally:
            self.held = ""
        await self._parts.board.show("waiting")

    async def _wait_for_person(
        self, moved: Moved, stop: asyncio.Event, carry_out: Callable[[Letter], Awaitable[object]]
    ) -> None:
        while not stop.is_set():
            await self._parts.board.show("paused", problem=self.held)
            letter = await self._next_letter(stop)
            latest = await self._latest()
            ours = latest is not None and self._serving.owns(latest)
            if latest is not None and latest != moved.latest and not ours:
                moved = Moved(latest)
                self.held = self._why(moved)
                await self._alert(moved)
            if letter is None:
                if ours:
                    log.info("train.resumed", because="the latest is the run's own again")
                    return
                continue
            if isinstance(letter.order, ResumeOrder):
                answer = await self._resume(letter.order.action, moved)
                told: Answer = answer if isinstance(answer, ResumeAnswer) else refusal(answer)
                await self._parts.mailbox.answer(letter, told)
                if isinstance(answer, ResumeAnswer):
                    return
            else:
                await carry_out(letter)

    async def _next_letter(self, stop: asyncio.Event) -> Letter | None:
        """The next order; None after a while, or when the run is stopped."""
        order = asyncio.create_task(self._parts.mailbox.next())
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

    async def _resume(self, action: ForeignAction, moved: Moved) -> ResumeAnswer | ParallmError:
        """Go on from their version, or serve ours again."""
        try:
            if action == "adopt":
                await self._serving.adopt(moved.latest)
            else:
                await self._serving.override(f"{self._named(moved)} is overridden by the trainer")
        except ParallmError as error:
            log.error("train.not_resumed", action=action, reason=error.message)
            return error
        log.warning("train.resumed", action=action, version=self._state.version)
        return ResumeAnswer(action, self._state.version)

    async def _alert(self, moved: Moved) -> None:
        does = {"adopt": "training goes on from it", "override": "the run's own is served again"}
        then = does.get(self._settings.on_foreign_version, "the run is paused")
        await self._parts.sink.alert("foreign_version", f"{self._happened(moved)}; {then}")

    def _why(self, moved: Moved) -> str:
        own = version_id(self._settings.adapter, self._state.version)
        return (
            f"{self._happened(moved)}: POST /v1/training/resume with action adopt (train on from it) or override "
            f"(serve {own} again), or make {own} the latest"
        )

    def _happened(self, moved: Moved) -> str:
        own = version_id(self._settings.adapter, self._state.version)
        if not moved.latest:
            return f"somebody has deleted {self._settings.adapter}, of which this run serves {own}"
        return f"somebody has made {self._named(moved)} the latest, this run serves {own}"

    def _named(self, moved: Moved) -> str:
        return version_id(self._settings.adapter, moved.latest) if moved.latest else "nothing"
