"""Writing a run's files: on a full disk the run holds, alerts, and goes on as soon as there is room.

Invariant. What is written here may be done again from its beginning, so nothing is lost by waiting: the policy keeps
its weights, what it has learned from stays unacknowledged until a checkpoint is on disk, and chats go on.
"""

import asyncio
import contextlib
import errno
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog
from safetensors import SafetensorError

from shared.errors import SetupError
from shared.training import AlertKind

log = structlog.get_logger()

LOOK_S = 5.0  # between two tries while the disk is full
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG})
_NUMBER = re.compile(r"os error (\d+)")  # how safetensors, which is written in Rust, reports it

T = TypeVar("T")


@dataclass(frozen=True)
class Disk:
    """Where a run's files go."""

    folder: Path
    alert: Callable[[AlertKind, str], Awaitable[None]]
    stop: asyncio.Event  # ends the waiting: then the last checkpoint counts
    look_s: float = LOOK_S

    async def run(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call `function` in a thread, and again while the disk is full; what it returns."""
        return await self.write(lambda: asyncio.to_thread(function, *arguments, **named))

    async def write(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await `work`, and again while the disk is full; what it returns.

        SetupError when the run is stopped meanwhile, or may not write there at all.
        """
        reported = False
        while True:
            try:
                return await work()
            except (OSError, SafetensorError) as error:
                number = _number(error)
                if number in _REFUSED:
                    raise SetupError(f"cannot write the run's files in {self.folder}: {error}") from error
                if number not in _FULL:
                    raise
                if self.stop.is_set():
                    raise SetupError(
                        f"no room for the run's files in {self.folder}: {error}; the last checkpoint counts: "
                        "make room and start the same command again"
                    ) from error
                if not reported:
                    reported = True
                    await self._notify(f"no room for the run's files in {self.folder}: {error}; training holds")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), self.look_s)

    async def _notify(self, message: str) -> None:
        log.error("train.disk_full", folder=str(self.folder), hint="training goes on as soon as there is room")
        try:
            await self.alert("disk_full", message)
        except Exception as error:  # the ring may be short of room, too: that must not end a run that waits for it
            log.warning("train.alert_lost", reason=type(error).__name__)


def _number(error: OSError | SafetensorError) -> int | None:
    """The error's number in the operating system."""
    if isinstance(error, OSError):
        return error.errno
    match = _NUMBER.search(str(error))
    return int(match[1]) if match else None
