"""Writes parcels in a thread of its own: from a bounded queue, with patience where files are to last.

Invariants. `offer` never waits. What it has taken comes back through `returned`, written or not, for its arrays are the
engine thread's to drop. A disk that refuses is logged once, and left alone for a while: what comes meanwhile is
dropped and counted.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_model.config import DiskConfig
from worker.engine.prefixes.disk.folder import Folder
from worker.engine.prefixes.disk.index import FileEntry, Index
from worker.engine.prefixes.parcels import KvParcel, pack

log = logging.getLogger(__name__)

REST_S = 30.0  # after a write has failed
RETRY_S = 0.1  # before the first retry; each later one waits twice as long


@dataclass(eq=False)
class WriteJob:
    """A parcel that is to be written."""

    name: str
    parcel: KvParcel
    arrays: list[Any]  # that the parcel's bytes belong to
    forgotten: bool = False  # since it was offered


class Writer:
    """Writes parcels into one folder. `returned` is called where it writes: in a thread of its own, or in `offer`."""

    def __init__(
        self,
        folder: Folder,
        index: Index,
        config: DiskConfig,
        returned: Callable[[list[WriteJob]], None],
        *,
        in_thread: bool,
    ) -> None:
        self._folder = folder
        self._index = index
        self._config = config
        self._returned = returned
        self._news = threading.Condition()
        self._jobs: deque[WriteJob] = deque()
        self._under_way: list[WriteJob] = []
        self._closing = self._urgent = False
        self._rests_until = 0.0
        self._trouble = ""  # that was logged
        self._thread: threading.Thread | None = None
        self.dropped = self.errors = self.written_bytes = 0
        if config.async_writes and in_thread:
            self._thread = threading.Thread(target=self._run, name="kv-disk-writer", daemon=True)
            self._thread.start()

    def offer(self, job: WriteJob, *, urgent: bool = False) -> None:
        """Write it soon; at once when much waits."""
        if self._thread is None:
            self._write([job])
            return
        with self._news:
            self._jobs.append(job)
            self._urgent |= urgent
            self._news.notify()

    def close(self, timeout_s: float) -> None:
        """Write what waits, if that takes no longer."""
        if self._thread is None:
            return
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(timeout_s)

    def forget(self) -> None:
        """Nothing that was offered is to be on disk."""
        with self._news:
            for job in (*self._jobs, *self._under_way):
                job.forgotten = True

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._jobs or self._closing)
                if self._jobs:  # others may come, which are written and synced together
                    self._news.wait_for(lambda: self._urgent or self._closing, self._config.flush_interval_s)
                elif self._closing:
                    return
                self._under_way, self._jobs, self._urgent = list(self._jobs), deque(), False
            self._write(self._under_way)

    def _write(self, jobs: list[WriteJob]) -> None:
        try:
            for job in jobs:
                if not job.forgotten:
                    self._write_one(job)
            self._folder.sync()
        except OSError as error:
            self._warn(error)
        except Exception:  # whatever it is, the next one may be written
            log.exception("kv.disk_writer_failed")
        finally:
            self._returned(jobs)

    def _write_one(self, job: WriteJob) -> None:
        if time.monotonic() < self._rests_until or not self._attempts(job):
            self.dropped += 1
        elif job.forgotten:
            self._index.discard([job.name])
            self._folder.remove([job.name])

    def _attempts(self, job: WriteJob) -> bool:
        """Write a parcel, with retries where it is to last; whether it is on disk."""
        left = self._config.max_retries if self._config.durable else 0
        wait_s = RETRY_S
        made_again = False
        while True:
            try:
                return self._keep(job)
            except OSError as error:
                self.errors += 1
                self._warn(error)
                if error.errno == errno.ENOENT and not made_again:
                    made_again = self._make_again()
                    if made_again:
                        continue
            if not left or self._closing:
                self._rests_until = time.monotonic() + REST_S
                return False
            left -= 1
            time.sleep(wait_s)
            wait_s *= 2

    def _keep(self, job: WriteJob) -> bool:
        packed = pack(job.parcel)
        size = self._folder.write(job.name, [packed.head, *packed.parts])
        if not size:
            return False
        self.written_bytes += size
        self._index.add(FileEntry(job.name, job.parcel.label, size))
        if self._trouble:
            log.info("kv.disk_writes_again")
            self._trouble = ""
        return True

    def _make_again(self) -> bool:
        """The folder has gone while we run; whether it is there now."""
        self._index.discard(self._index.names)
        try:
            self._folder.open()
        except OSError as error:
            self._warn(error)
            return False
        return True

    def _warn(self, error: OSError) -> None:
        reason = f"{type(error).__name__}: {error.strerror or error}"
        if reason != self._trouble:
            log.warning("kv.disk_write_failed reason=%r rests_s=%.0f", reason, REST_S)
            self._trouble = reason
