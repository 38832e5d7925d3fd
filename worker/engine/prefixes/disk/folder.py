"""Files of KV in a folder that the workers of a machine share: bounded in bytes and in age.

`ROOT/MODEL/NAME.safetensors`: MODEL stands for a base model and all that its KV depends on (parcels.identity_of), NAME
for what the file holds. `ROOT/.lock` is locked while a process adds or removes files, and says how many bytes there
are, and the folder's id: a random name, by which workers learn of one another that they share it.

Invariants.
- The sizes of all files under ROOT never come to more than the bound. A writer has made room under the lock, and
  has taken it with a `.part` of the full size, before the first byte is written.
- `.lock` says the sum or more, never less: a process that is killed leaves it too high until the next count.
- A file under its final name has been written to its end. What a power cut or a disk makes of it, its checksum shows.
- Files get and lose their names under the lock, so its holder sees them all, and each once.
- A `.part` without a lock was left by a dead process; the next count removes it.
- Nothing is counted or removed that is not called as we call files: the folder may hold others' things.
- Files are never changed, and a reader has them open: removing one takes nothing away from it. Their time is the last
  use, by which they are removed.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FILE, PART = ".safetensors", ".part"
LOCK, IN_USE = ".lock", ".in-use"
FREED = 0.05  # of the bound, when it is reached: a count reads the whole folder
_DIGITS = 20
_ID_BYTES = 16  # in `.lock`, after the digits
_ID = re.compile(rb"[0-9a-f]{16}")
_PLACE = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}")
_NAME = re.compile(r"[0-9a-f]{32}(\.safetensors|\.[0-9a-f]{8}\.part)")


@dataclass(frozen=True)
class _Kept:
    used_at: float
    size: int
    path: Path


class Folder:
    """One model's part of it. Any thread may call, one at a time; OSError where the disk does not do its part."""

    def __init__(self, root: Path, base: str, identity: str, *, max_bytes: int, ttl_s: float, durable: bool) -> None:
        """`max_bytes`, `ttl_s`: 0 is no bound; `durable`: what `write` and `sync` have written survives a power cut."""
        self._root = root
        self._base = hashlib.blake2b(base.encode(), digest_size=8).hexdigest()
        self._place = root / f"{self._base}-{identity}"
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._durable = durable
        self._used: int | None = None  # a lock that says that this place is in use
        self.id = ""  # as known last
        self.bytes = 0  # of all files, as known last
        self.evicted = 0  # files removed for want of room, or because of their age

    def open(self, *, parents: bool = False) -> None:
        """Make what is missing, and count; what this base has left for other releases or settings goes."""
        self._root.mkdir(mode=0o700, parents=parents, exist_ok=True)
        with self._locked() as lock:
            self._place.mkdir(mode=0o700, exist_ok=True)
            self.close()
            self._used = os.open(self._place / IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._used, fcntl.LOCK_SH)
            for place in self._places():
                if place != self._place and place.name.startswith(self._base) and _is_unused(place):
                    shutil.rmtree(place, ignore_errors=True)
            self._write_total(lock, self._count())

    def close(self) -> None:
        """This place is not in use by us any more."""
        if self._used is not None:
            os.close(self._used)
            self._used = None

    # -- files

    def sizes(self) -> dict[str, int]:
        """The files of this model, by name."""
        found: dict[str, int] = {}
        for entry in os.scandir(self._place):
            with contextlib.suppress(FileNotFoundError):
                if entry.name.endswith(FILE) and _NAME.fullmatch(entry.name):
                    found[entry.name.removesuffix(FILE)] = entry.stat().st_size
        return found

    def changed_at(self) -> float:
        """When this model's files became more or fewer, Unix time."""
        return self._place.stat().st_mtime

    def head(self, name: str, most: int) -> bytes:
        """A file's first bytes, as safetensors says how many: its header; at most so many."""
        with self._path(name).open("rb") as file:
            begin = file.read(8)
            return begin + file.read(min(most, int.from_bytes(begin, "little")))

    def read(self, name: str) -> bytearray:
        """A file's bytes; this is a use."""
        path = self._path(name)
        with path.open("rb", buffering=0) as file:
            data = bytearray(os.fstat(file.fileno()).st_size)
            view, done = memoryview(data), 0
            while done < len(data) and (count := file.readinto(view[done:])):
                done += count
        with contextlib.suppress(OSError):  # a folder that we may only read
            os.utime(path)
        return data

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> int:
        """Keep a file; its size, or 0 where there is no room for it."""
        size = sum(memoryview(part).nbytes for part in parts)
        if self._path(name).exists():
            return size
        part = self._place / f"{name}.{uuid.uuid4().hex[:8]}{PART}"
        file = self._take(part, size)
        if file is None:
            return 0
        try:
            for each in parts:
                _write(file, memoryview(each))
            if self._durable:
                os.fsync(file)
            self._put(part, self._path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                self._remove([part])
            raise
        finally:
            os.close(file)
        return size

    def sync(self) -> None:
        """Where files must survive a power cut, their names must, too."""
        if self._durable:
            place = os.open(self._place, os.O_RDONLY)
            try:
                os.fsync(place)
            finally:
                os.close(place)

    def remove(self, names: Sequence[str]) -> None:
        """Remove the files of these names and subtract their sizes."""
        self._remove([self._path(name) for name in names])

    def expire(self) -> None:
        """Remove files unused for too long, and count the rest."""
        with self._locked() as lock:
            if self._ttl_s:
                old = time.time() - self._ttl_s
                self._evict([kept for kept in self._kept() if kept.used_at < old])
            self._write_total(lock, self._count())

    # -- bytes

    def _take(self, part: Path, size: int) -> int | None:
        """Take the bytes for a file, as an open and locked one of that size; None where there is no room."""
        with self._locked() as lock:
            total = _read_total(lock)
            if total is None or (self._max_bytes and total + size > self._max_bytes):
                total = self._make_room(size)
            if self._max_bytes and total + size > self._max_bytes:
                self._write_total(lock, total)
                return None
            self._write_total(lock, total + size)
            file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                os.ftruncate(file, size)
            except BaseException:
                os.close(file)
                part.unlink(missing_ok=True)
                self._write_total(lock, total)
                raise
            return file

    def _put(self, part: Path, path: Path) -> None:
        """Give a file its name; under the lock, for a count may miss what is renamed meanwhile."""
        with self._locked() as lock:
            before = path.stat().st_size if path.exists() else 0  # another worker was as quick
            part.replace(path)
            total = _read_total(lock)
            self._write_total(lock, self._count() if total is None else total - before)

    def _make_room(self, size: int) -> int:
        """Remove what was used least lately until so many bytes fit; the sum of what is left."""
        total = self._count()
        if not self._max_bytes or size > self._max_bytes or total + size <= self._max_bytes:
            return total
        most = max(self._max_bytes - size - FREED * self._max_bytes, 0)
        gone: list[_Kept] = []
        for kept in sorted(self._kept(), key=lambda kept: kept.used_at):
            if total <= most:
                break
            total -= kept.size
            gone.append(kept)
        self._evict(gone)
        return self._count()

    def _evict(self, files: Sequence[_Kept]) -> None:
        for kept in files:
            kept.path.unlink(missing_ok=True)
        self.evicted += len(files)

    def _remove(self, paths: Sequence[Path]) -> None:
        with self._locked() as lock:
            total = _read_total(lock)
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    size = path.stat().st_size
                    path.unlink()
                    total = None if total is None else total - size
            self._write_total(lock, self._count() if total is None else total)

    def _count(self) -> int:
        """The sizes of all files; what dead processes have left half written is removed."""
        total = _DIGITS + _ID_BYTES  # of `.lock`
        for path in self._files():
            with contextlib.suppress(FileNotFoundError):
                if path.suffix == PART and _is_unused(path):
                    path.unlink()
                else:
                    total += path.stat().st_size
        return total

    def _kept(self) -> list[_Kept]:
        """The whole files, of all models."""
        found: list[_Kept] = []
        for path in self._files():
            with contextlib.suppress(FileNotFoundError):
                if path.suffix == FILE:
                    stat = path.stat()
                    found.append(_Kept(stat.st_mtime, stat.st_size, path))
        return found

    def _places(self) -> list[Path]:
        return [Path(entry.path) for entry in os.scandir(self._root) if _PLACE.fullmatch(entry.name)]

    def _files(self) -> Iterator[Path]:
        for place in self._places():
            with contextlib.suppress(FileNotFoundError):
                yield from (Path(entry.path) for entry in os.scandir(place) if _NAME.fullmatch(entry.name))

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the folder's lock: no other process adds or removes files."""
        path = self._root / LOCK
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if _is_at(lock, path):
                    yield lock
                    return
            finally:
                os.close(lock)

    def _write_total(self, lock: int, total: int) -> None:
        os.pwrite(lock, f"{total:0{_DIGITS}d}".encode(), 0)
        self.bytes = total
        self.id = _id_in(lock)  # each time: the folder may have been removed and made again

    def _path(self, name: str) -> Path:
        return self._place / f"{name}{FILE}"


def _read_total(lock: int) -> int | None:
    """Bytes counted by all processes; None if no process has counted."""
    digits = os.pread(lock, _DIGITS, 0)
    return int(digits) if len(digits) == _DIGITS and digits.isdigit() else None


def _id_in(lock: int) -> str:
    """The folder's id; created if there is none."""
    found = os.pread(lock, _ID_BYTES, _DIGITS)
    if not _ID.fullmatch(found):
        found = secrets.token_hex(_ID_BYTES // 2).encode()
        os.pwrite(lock, found, _DIGITS)
    return found.decode()


def _is_at(file: int, path: Path) -> bool:
    """True if `path` still names the open file: the folder may have been removed and made again."""
    with contextlib.suppress(FileNotFoundError):
        return os.fstat(file).st_ino == path.stat().st_ino
    return False


def _is_unused(path: Path) -> bool:
    """True if no living process holds a lock on a `.part` file, or on a place through its `.in-use`."""
    try:
        file = os.open(path / IN_USE if path.is_dir() else path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


def _write(file: int, data: memoryview) -> None:
    left = data.cast("B") if data.nbytes else data
    while left.nbytes:
        left = left[os.write(file, left) :]
