"""The run's side of the board in Redis: a heartbeat with the totals, a point on the curves after each train step.

Invariant: one trainer a policy. A run waits for the policy's owner to end (a dead one is gone after TRAINER_TTL_S, or
at once when it was a process of this host), and stops when another one has taken the policy from it.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Protocol, Self

import msgspec
import structlog
from redis.exceptions import RedisError

from shared.errors import ConflictError, ParallmError
from shared.machine.status import MachineStatus
from shared.redis import keys
from shared.redis.connection.faults import reason
from shared.training import TrainerState, TrainerStatus, TrainingPoint

log = structlog.get_logger()

BEAT_S = keys.TRAINER_TTL_S / 4
_AWAY = (RedisError, OSError, ParallmError)
WAIT_FOR_OWNER_S = 2.5 * keys.TRAINER_TTL_S


class BoardStore(Protocol):
    """Storage of the board: Redis (`TrainingBoard`), or an api (`trainer.ring.over_http.HttpBoard`)."""

    policy: str

    async def hold(self, owner: str, instead_of: str = "") -> str:
        """Own the policy for TRAINER_TTL_S; the owner from now on. `instead_of`: one that is known to be dead."""

    async def let_go(self, owner: str) -> None:
        """Give the policy up, if it is `owner`'s."""

    async def write(self, status: TrainerStatus) -> None: ...

    async def add(self, point: TrainingPoint) -> None:
        """One more train step on the curves."""


class RingBoard:
    """A ring's board. Entering it takes the policy; ConflictError when another trainer has it and lives on."""

    def __init__(self, board: BoardStore, memory: Callable[[], MachineStatus] = MachineStatus) -> None:
        """`memory`: that this process holds, as the machine reports it."""
        self._board, self._memory = board, memory
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self._state: TrainerState = "starting"
        self._problem = ""
        self._status: Callable[[TrainerState], TrainerStatus] | None = None
        self._stop: Callable[[], None] = lambda: None
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        until = time.monotonic() + WAIT_FOR_OWNER_S
        holder = await self._board.hold(self.owner)
        if holder != self.owner and not _dead(holder):
            log.warning("train.policy_taken", policy=self._board.policy, trainer=holder, waits_s=WAIT_FOR_OWNER_S)
        while holder != self.owner:
            if not _dead(holder) and time.monotonic() > until:
                raise ConflictError(
                    f"policy {self._board.policy!r} has a trainer already: {holder} (host:process:start); end that "
                    "one, or publish under another name (--adapter)"
                )
            await asyncio.sleep(0.2)
            holder = await self._board.hold(self.owner, holder if _dead(holder) else "")
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        with contextlib.suppress(*_AWAY):
            failed = error is not None and not isinstance(error, asyncio.CancelledError)
            text = reason(error) if isinstance(error, RedisError) else str(error)
            problem = f"{type(error).__name__}: {text}" if failed else ""
            await self.show("failed" if failed else "ended", problem=problem)
            await self._board.let_go(self.owner)

    def begin(self, status: Callable[[TrainerState], TrainerStatus], stop: Callable[[], None]) -> None:
        """Begin heartbeats with `status`; `stop` ends the run when the policy has gone to another trainer."""
        self._status, self._stop = status, stop

    async def show(self, state: TrainerState, point: TrainingPoint | None = None, problem: str = "") -> None:
        """Write the run's state, the point of its last train step, and the problem that keeps it from learning.

        A ring that is away is not waited for: the next heartbeat says the same.
        """
        self._state, self._problem = state, problem[:2000]
        with contextlib.suppress(*_AWAY):
            if point is not None:
                await self._board.add(point)
            await self._write()

    def note(self, problem: str) -> None:
        """Set the problem that the next heartbeat reports; "": there is none any more."""
        self._problem = problem[:2000]

    async def _write(self) -> None:
        if self._status is not None:
            now_ms = time.time_ns() // 1_000_000
            status = self._status(self._state)
            machine = await asyncio.to_thread(self._memory)
            stamp = {"owner": self.owner, "heartbeat_ms": now_ms, "problem": self._problem, "machine": machine}
            await self._board.write(msgspec.structs.replace(status, **stamp))

    async def _beat(self) -> None:
        while True:
            try:
                holder = await self._board.hold(self.owner)
                if holder != self.owner:
                    log.error("train.policy_lost", policy=self._board.policy, to=holder)
                    self._stop()
                    return
                await self._write()
            except _AWAY as error:
                log.warning("train.board_away", error=reason(error))
            await asyncio.sleep(BEAT_S)


def _dead(owner: str) -> bool:
    """True if the owner was a process of this host that has ended."""
    host, _, rest = owner.partition(":")
    pid = rest.partition(":")[0]
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
