"""What is on disk: looked over now and then, read and checked when it is wanted, removed when it is of no use.

Invariants. Every parcel that leaves here is whole, and was computed by what computes here. A file that is not is
removed, logged and never looked at again. A file that has gone is no trouble: others share the folder.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from worker.engine.prefixes.disk.folder import Folder
from worker.engine.prefixes.disk.index import FileEntry, Index
from worker.engine.prefixes.parcels import MAX_HEADER_BYTES, KvParcel, UnusableParcelError, label_of, unpack

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0  # for files of other workers
EXPIRE_EVERY_S = 60.0
CLOCK_S = 1.0  # of a file system, at the coarsest


class Errands:
    """A few threads that a hanging disk may hold: nothing waits for their end, not even the process."""

    def __init__(self, threads: int) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = threads
        for number in range(threads):
            threading.Thread(target=self._run, name=f"kv-disk-reader-{number}", daemon=True).start()

    def run(self, call: Callable[[], None]) -> None:
        """Queue a call for the thread."""
        self._calls.put(call)

    def close(self) -> None:
        """End the threads, each after what it is at."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                log.exception("kv.disk_reader_failed")


class FileShelf:
    """The files of one model. Any thread may call; nothing here touches MLX."""

    def __init__(self, folder: Folder, index: Index, identity: str) -> None:
        self._folder = folder
        self._index = index
        self._identity = identity
        self._trouble = ""
        self._seen = 0.0  # the change of the folder that all is known of
        self._counting = threading.Lock()
        self.errors = 0

    def look(self) -> None:
        """Know of all files that are there, by their first bytes."""
        try:
            began, changed_at = time.time(), self._folder.changed_at()
            if changed_at == self._seen:
                return
            sizes = self._folder.sizes()
            known = self._index.names
            self._index.discard(name for name in known if name not in sizes)
            for name in sizes.keys() - known:
                self._learn(name, sizes[name])
            self._seen = changed_at if changed_at < began - CLOCK_S else 0.0  # another may come within the same tick
        except FileNotFoundError:  # removed while we run; the next write makes it again
            self._index.discard(self._index.names)
        except OSError as error:
            self._fail(error)

    def expire(self) -> None:
        """Remove files that are unused for too long."""
        try:
            self._folder.expire()
        except FileNotFoundError:
            return
        except OSError as error:
            self._fail(error)

    def fetch(self, entry: FileEntry) -> KvParcel | None:
        """Read and check a file; None when it cannot be used, and then it is known no more."""
        try:
            parcel = unpack(self._folder.read(entry.name), self._identity)
            if parcel.label != entry.label:
                raise UnusableParcelError("it holds something else than its name says")
            return parcel
        except FileNotFoundError:
            self._index.discard([entry.name])
        except UnusableParcelError as error:
            self._throw_away(entry.name, str(error))
        except OSError as error:
            self._index.discard([entry.name])
            self._fail(error)
        return None

    def forget(self, names: list[str]) -> None:
        """Remove these files from the index and the folder."""
        self._index.discard(names)
        try:
            self._folder.remove(names)
        except FileNotFoundError:
            return
        except OSError as error:
            self._fail(error)

    def _learn(self, name: str, size: int) -> None:
        try:
            label, whole = label_of(self._folder.head(name, MAX_HEADER_BYTES))
            if size != whole:
                raise UnusableParcelError(f"{size} bytes in place of {whole}")
            if label.identity != self._identity or label.name != name:
                raise UnusableParcelError("it holds something else than its name says")
        except FileNotFoundError:
            return
        except UnusableParcelError as error:
            self._throw_away(name, str(error))
        else:
            self._index.add(FileEntry(name, label, size))

    def _throw_away(self, name: str, reason: str) -> None:
        with self._counting:
            self.errors += 1
        log.warning("kv.disk_file_removed file=%s reason=%r", name, reason)
        self.forget([name])

    def _fail(self, error: OSError) -> None:
        reason = f"{type(error).__name__}: {error.strerror or error}"
        with self._counting:
            self.errors += 1
            is_known, self._trouble = self._trouble == reason, reason
        if not is_known:
            log.warning("kv.disk_read_failed reason=%r", reason)
