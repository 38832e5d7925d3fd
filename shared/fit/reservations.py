"""Memory that processes of ours on this machine have promised themselves and need not have taken yet.

Each process keeps one file in a folder of the user's, locked as long as it lives, so that a killed one leaves nothing
that counts. Deciding and promising happen under one lock: two workers that start at the same time do not both take
the last of the memory. Processes of another user, or in another container, are not seen here; what they hold is seen by
the system's own figures.
"""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

import msgspec
import structlog

from shared.machine.memory import footprint

log = structlog.get_logger()
T = TypeVar("T")

_LOCK = "lock"


class Reservation(msgspec.Struct, frozen=True):
    """Bytes that one process has promised itself."""

    pid: int
    purpose: str  # for people: "worker of mlx-community/..."
    bytes: int
    pool: str = "machine"  # or a GPU with memory of its own

    @property
    def held(self) -> int:
        """Bytes that the process has taken of it by now."""
        return footprint(self.pid)

    @property
    def outstanding(self) -> int:
        """Bytes that it has not taken yet."""
        return max(0, self.bytes - self.held)


class Reservations:
    """The reservations of one user on this machine; `folder` is for tests."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"parallm-{os.getuid()}" / "memory"
        self._own: IO[bytes] | None = None

    def others(self, pool: str = "machine") -> list[Reservation]:
        """Live reservations of other processes."""
        return [each for each in self._read() if each.pool == pool and each.pid != os.getpid()]

    def reserve(self, decide: Callable[[list[Reservation]], tuple[T, Reservation]]) -> T:
        """Let `decide` see the others' reservations, keep what it promises, and return what it has decided.

        What it raises leaves nothing behind. Without a folder that is ours alone it decides as if there were no others.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._folder.stat().st_uid != os.getuid():
                raise PermissionError(f"{self._folder} belongs to another user")
            lock = (self._folder / _LOCK).open("ab")
        except OSError as error:
            log.warning("memory.no_reservations", error=str(error))
            return decide([])[0]
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            result, mine = decide([each for each in self._read() if each.pool and each.pid != os.getpid()])
            self._keep(mine)
            return result

    def release(self) -> None:
        """Withdraw the reservation that this process has made."""
        if self._own is not None:
            with contextlib.suppress(OSError):
                Path(self._own.name).unlink()
            self._own.close()
            self._own = None

    def _keep(self, mine: Reservation) -> None:
        own = self._own
        if own is None:
            own = (self._folder / f"{mine.pid}").open("w+b")
            fcntl.flock(own, fcntl.LOCK_EX)
            self._own = own
        own.seek(0)
        own.truncate()
        own.write(msgspec.json.encode(mine))
        own.flush()

    def _read(self) -> Iterator[Reservation]:
        try:
            files = [file for file in sorted(self._folder.iterdir()) if file.name.isdigit()]
        except OSError:
            return
        for file in files:
            if file.name == str(os.getpid()):
                continue
            with contextlib.suppress(OSError), file.open("rb") as stream:
                if not _is_held(stream):
                    file.unlink(missing_ok=True)
                    continue
                with contextlib.suppress(msgspec.DecodeError):
                    yield msgspec.json.decode(stream.read(), type=Reservation)


def _is_held(stream: IO[bytes]) -> bool:
    """True if the process that wrote the file lives."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


RESERVATIONS = Reservations()  # one folder and one file a process
