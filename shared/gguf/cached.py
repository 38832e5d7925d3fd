"""Folders of GGUF files that are served: `--model FILE.gguf` is converted once, and found again.

A folder is named after the file's path, size and time of change. The cache is bounded: folders that were not used for
the longest time go when another one comes. What a running worker has read stays in its memory.
"""

import fcntl
import hashlib
import os
import shutil
from pathlib import Path

from shared.errors import SetupError
from shared.gguf.conversion import Conversion

FOLDER = "PARALLM_GGUF_CACHE_DIR"  # environment: where, by default in the user's cache
SIZE_GB = "PARALLM_GGUF_CACHE_GB"  # environment: how much, 100 by default
_DEFAULT_GB = 100.0


def is_gguf(name: str) -> bool:
    """True if a model's name is that of a GGUF file."""
    return name.lower().endswith(".gguf") and Path(name).expanduser().is_file()


def cached_folder(file: Path) -> Path:
    """The folder of a GGUF file, which is converted if it was not; SetupError says why it cannot be."""
    file = file.expanduser().resolve()
    home = Path(os.environ.get(FOLDER) or "~/.cache/mlx_parallm/gguf").expanduser()
    most = _most_bytes()
    status = file.stat()
    key = hashlib.sha256(f"{file}\n{status.st_size}\n{status.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = home / f"{file.stem}-{key}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with (home / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # others that want the same file wait for its folder
            if not folder.is_dir():
                for begun in home.glob("*.partial-*"):  # by a process that was killed: the lock is ours
                    shutil.rmtree(begun, ignore_errors=True)
                Conversion(file).write(folder)
                _bound(home, folder, most)
            os.utime(folder)
    except OSError as error:
        raise SetupError(f"cannot keep {file.name} converted in {home} ({FOLDER}): {error}") from error
    return folder


def _most_bytes() -> int:
    text = os.environ.get(SIZE_GB) or str(_DEFAULT_GB)
    try:
        return int(float(text) * 1e9)
    except ValueError as error:
        raise SetupError(f"{SIZE_GB} is {text!r}, not a number of gigabytes") from error


def _bound(home: Path, newest: Path, most: int) -> None:
    """Remove the folders that were used longest ago until the rest is small enough; the newest one stays."""
    folders = sorted((each for each in home.iterdir() if each.is_dir() and each != newest), key=_used)
    sizes = {folder: _size(folder) for folder in folders}
    total = _size(newest) + sum(sizes.values())
    for folder in folders:
        if total <= most:
            return
        shutil.rmtree(folder, ignore_errors=True)
        total -= sizes[folder]


def _used(folder: Path) -> float:
    return folder.stat().st_mtime


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
