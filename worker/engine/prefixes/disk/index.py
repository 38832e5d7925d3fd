"""What there is on disk, in memory: a look-up costs no I/O. May be used from any thread.

A file may go at any time, for others share the folder; who reads it finds out, and has it forgotten here.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from worker.engine.prefixes.parcels import Label


@dataclass(frozen=True)
class FileEntry:
    """One file of KV and what it holds."""

    name: str
    label: Label
    size: int


class Index:
    """The files of one model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, FileEntry] = {}
        self._blocks: dict[bytes, FileEntry] = {}
        self._snapshots: dict[bytes, dict[tuple[int, ...], FileEntry]] = {}

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> list[str]:
        with self._lock:
            return list(self._files)

    def add(self, entry: FileEntry) -> None:
        """Enter a file that has been written or found."""
        label = entry.label
        with self._lock:
            self._files[entry.name] = entry
            if label.tail is None:
                self._blocks.update(dict.fromkeys(label.keys, entry))
            else:
                self._snapshots.setdefault(label.keys[0], {})[label.tail] = entry

    def discard(self, names: Iterable[str]) -> None:
        """Forget files that have been removed."""
        with self._lock:
            for name in names:
                entry = self._files.pop(name, None)
                if entry is not None:
                    self._forget(entry)

    def block(self, key: bytes) -> FileEntry | None:
        """A file that holds this block."""
        return self._blocks.get(key)

    def snapshots(self, key: bytes) -> list[FileEntry]:
        """Files of snapshots after this block."""
        with self._lock:
            return list(self._snapshots.get(key, {}).values())

    def _forget(self, entry: FileEntry) -> None:
        label = entry.label
        if label.tail is None:
            for key in label.keys:
                if self._blocks.get(key) is entry:
                    del self._blocks[key]
            return
        behind = self._snapshots.get(label.keys[0], {})
        if behind.get(label.tail) is entry:
            del behind[label.tail]
        if not behind:
            self._snapshots.pop(label.keys[0], None)
