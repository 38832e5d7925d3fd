"""One trainer a run folder: a lock of the operating system, which a killed process cannot leave behind."""

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from shared.errors import SetupError

log = structlog.get_logger()

WAIT_S = 5.0  # for a trainer that is about to end
LOOK_S = 0.1


@asynccontextmanager
async def run_lock(folder: Path, wait_s: float = WAIT_S) -> AsyncIterator[None]:
    """Hold the run's folder; SetupError when another trainer has it, or when nothing can be written there.

    The lock's file lies beside the folder, which is renamed when a run begins anew.
    """
    _check_case(folder)
    descriptor = _open(folder)
    try:
        await _acquire(descriptor, folder, wait_s)
        yield
    finally:
        os.close(descriptor)


def _check_case(folder: Path) -> None:
    """SetupError where another policy's folder is the same one: APFS does not tell capitals from small letters."""
    try:
        others = [each for each in folder.parent.iterdir() if each.name != folder.name]
        shared = [each for each in others if each.name.lower() == folder.name.lower() and each.samefile(folder)]
    except OSError:  # there is no such folder yet
        return
    if shared:
        raise SetupError(
            f"{folder} and {shared[0]} are one folder, since this disk ignores the case of letters: give "
            "another --adapter, --run or --run-dir"
        )


def _open(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise SetupError(
            f"cannot write the run's files in {folder}: {error.strerror}; give another --run-dir"
        ) from error


async def _acquire(descriptor: int, folder: Path, wait_s: float) -> None:
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if time.monotonic() > until:
                holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
                raise SetupError(
                    f"another trainer (process {holder}) has the run's folder {folder}: give this one a --run or "
                    "--run-dir of its own"
                ) from error
        except OSError as error:  # a file system without locks
            log.warning("run.not_locked", folder=str(folder), reason=error.strerror)
            return
        await asyncio.sleep(LOOK_S)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
