"""Adapter bytes on a worker's disk, by sha256, bounded in bytes, shared by the processes of one machine.

Invariants.
- A file under its final name is whole: it is downloaded under `<sha256>.part`, hashed on the way, renamed. It is not
  synced, for a version's followers wait for it: what a power cut has damaged, the hash shows to the next process.
- Only one process downloads a version at a time (`flock` on the part; the lock ends with its process).
- A file in use is not evicted (`flock`, shared by the readers); of the others the least recently used goes
  first, until the rest fits into `max_bytes`.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO

import structlog

from shared.adapters import AdapterManifest
from shared.redis.adapters.catalog import AdapterCatalog

log = structlog.get_logger()

STALE_PART_S = 3600.0
POLL_S = (0.001, 0.05)  # for another process's download: soon at first, for a small one is there in a few ms


class DiskCache:
    """A folder of adapter files."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._verified: set[tuple[str, int]] = set()  # (sha256, inode) that this process has hashed
        path.mkdir(parents=True, exist_ok=True)

    @asynccontextmanager
    async def hold(self, catalog: AdapterCatalog, manifest: AdapterManifest) -> AsyncIterator[Path]:
        """The file of a version, downloaded if need be; it stays where it is inside the block."""
        while True:
            opening = asyncio.ensure_future(asyncio.to_thread(self._open, manifest))
            try:
                file = await asyncio.shield(opening)
            except asyncio.CancelledError:  # the thread goes on, and nothing closes what it opens
                opening.add_done_callback(_close)
                raise
            if file is not None:
                break
            await self._download(catalog, manifest)
        with file:
            yield self.file(manifest)

    def file(self, manifest: AdapterManifest) -> Path:
        """Where a version's file is, or would be."""
        return self._path / f"{manifest.sha256}.safetensors"

    def _open(self, manifest: AdapterManifest) -> BufferedReader | None:
        """The file, held by a shared lock, or None when it is not there, or not whole (then it is gone)."""
        path = self.file(manifest)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            if not _is_at(file, path):  # evicted between open and lock
                file.close()
                return None
            if not self._is_sound(file, manifest):
                log.warning("adapters.cache_damaged", adapter=manifest.id, file=str(path))
                path.unlink(missing_ok=True)
                file.close()
                return None
            os.utime(path)
        except BaseException:
            file.close()
            raise
        return file

    def _is_sound(self, file: BufferedReader, manifest: AdapterManifest) -> bool:
        """True if the file's size and content are those it was renamed with: a disk may lie after a power cut."""
        stat = os.fstat(file.fileno())
        if stat.st_size != manifest.size:
            return False
        known = (manifest.sha256, stat.st_ino)
        if known not in self._verified:
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest.sha256:
                return False
            self._verified.add(known)
        return True

    async def _download(self, catalog: AdapterCatalog, manifest: AdapterManifest) -> None:
        part = self._path / f"{manifest.sha256}.part"
        pause_s, longest_s = POLL_S
        with part.open("ab") as file:
            while not _lock(file):  # another process downloads it, and only the file system knows when it is done
                if not _is_at(file, part):  # renamed: its reader's lock is on the same file and may last
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            if not _is_at(file, part):
                return
            if self.file(manifest).exists():
                part.unlink()
                return
            file.truncate(0)
            try:
                await asyncio.to_thread(self._evict, manifest.size)
                async for chunk in catalog.fetch(manifest):
                    await asyncio.to_thread(file.write, chunk)
                await asyncio.to_thread(file.flush)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            self._verified.add((manifest.sha256, os.fstat(file.fileno()).st_ino))
            part.replace(self.file(manifest))

    def _evict(self, needed: int) -> None:
        """Make room for `needed` bytes; what others hold stays, even if the bound is passed by it."""
        files = self._files()
        excess = sum(size for _, _, size in files) + needed - self._max_bytes
        for _, path, size in files:
            if excess <= 0:
                break
            if _remove_unless_held(path):
                excess -= size
        for part in self._path.glob("*.part"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > STALE_PART_S:
                    _remove_unless_held(part)

    def _files(self) -> list[tuple[float, Path, int]]:
        """(last use, path, size) of the whole files, the least recently used first."""
        found: list[tuple[float, Path, int]] = []
        for path in self._path.glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found.append((stat.st_mtime, path, stat.st_size))
        return sorted(found)


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    """True if `path` still names the open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.fstat(file.fileno()).st_ino == path.stat().st_ino
    return False


def _close(opening: asyncio.Future[BufferedReader | None]) -> None:
    if not opening.cancelled() and opening.exception() is None and (file := opening.result()):
        file.close()


def _remove_unless_held(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        if _lock(file):
            path.unlink(missing_ok=True)
            return True
    return False
