"""A new folder that is there whole or not at all.

Invariants. Files are written into a folder beside it, `NAME.partial-...`, synced, and then renamed: one step. An error
or an interrupt removes what was begun; a kill leaves it under that name. Nothing that exists is written to, but for an
empty folder, whose place is taken.
"""

import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from shared.errors import SetupError


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `target` when the block ends well; SetupError when it cannot be written."""
    check_free(target)
    target = target.resolve()  # as its first reader does; its last part is no link
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    except OSError as error:
        raise SetupError(f"cannot make a folder in {target.parent}: {error.strerror or error}") from error
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            sync(path)
        partial.chmod(0o777 & ~_umask())
        _take_place(partial, target)
    except OSError as error:
        raise SetupError(f"cannot write {target}: {error}{room(target.parent)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_free(target: Path) -> None:
    """SetupError unless a folder can be made there."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise SetupError(f"{target} is there, and no folder: name a new one")
    if target.is_dir() and any(target.iterdir()):
        raise SetupError(f"{target} is not empty: name a new folder, nothing is written over")


def room(folder: Path) -> str:
    """Free space, as a phrase for the end of a message."""
    return f"; {shutil.disk_usage(folder).free / 1e9:.2f} GB are free there"


def sync(path: Path) -> None:
    """Have a file or a folder on the disk itself before anything that counts on it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if sys.platform == "darwin":  # there fsync leaves what the drive has in its cache
            with contextlib.suppress(OSError):  # a file system that knows no such command
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_place(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)  # an empty folder gives way, another one does not
    except OSError as error:
        check_free(target)  # another process was faster
        raise error
    sync(target.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
