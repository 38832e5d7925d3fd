"""KV on its way between memory and disk: what thread G does of it, a little between two steps, and who does the rest.

Out: an entry is offered -> cut into pieces of a few MB (`_leaving`) -> some arrays are copied between two steps, and
handed over between the next two, when the copies are there -> a thread packs and writes them. In: files are wanted ->
a thread reads and checks them -> some arrays are copied between two steps -> a whole one is reported to waiting rows.

Invariants. Lives in the engine's thread, and so do all arrays; other threads get bytes, and give back what they are
through with. What waits is bounded in number and in bytes; more is dropped and counted. Nothing here waits for a disk,
but for `close`, and for writes that were asked to be made at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_model.config import DiskConfig
from worker.engine.messages import DiskStats
from worker.engine.prefixes.disk.folder import Folder
from worker.engine.prefixes.disk.index import FileEntry, Index
from worker.engine.prefixes.disk.reading import EXPIRE_EVERY_S, LOOK_EVERY_S, Errands, FileShelf
from worker.engine.prefixes.disk.writing import WriteJob, Writer
from worker.engine.prefixes.parcels import KvParcel, Label, arranged, as_array, as_bytes, on_host
from worker.engine.prefixes.slabs import Layers, SlabCut, State

log = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20  # of a file, about; one block at least
FEWEST_WAITING = 8  # pieces that there is room for
ARRAY_BYTES = 4 << 20  # of each of its arrays: one at least is copied at once
COPIED_AT_ONCE = 64 << 20  # between two steps, to be written
COPIED_ON_CPU = 2 << 20  # there the next step waits for the copies
UPLOAD_S = 0.002  # between two steps, for what was read
READERS = 2
READ_AHEAD = 4  # files that are read and not in the cache yet
LAST_S = 5.0  # for writing at the end


@dataclass(eq=False)
class FilePiece:
    """The part of a row's KV that one file will hold."""

    label: Label
    cut: SlabCut | None
    state: State | None
    nbytes: int


@dataclass(eq=False)
class _Copies:
    """A piece's arrays, some of them copied."""

    piece: FilePiece
    cut: Layers
    states: Layers
    left: Iterator[mx.array]
    copies: list[mx.array]


@dataclass(eq=False)
class _Upload:
    """A file's arrays, some of them MLX's."""

    entry: FileEntry
    parcel: KvParcel
    arrays: list[mx.array]


class DiskTier:
    """One engine's KV files. `wake` triggers a turn of the engine; without it all runs at once, in its thread."""

    def __init__(
        self,
        config: DiskConfig,
        base_sha256: str,
        identity: str,
        block_size: int,
        most_waiting_bytes: int,
        wake: Callable[[], None] | None,
    ) -> None:
        self._config = config
        self._identity = identity
        self._block_size = block_size
        self._most_waiting_bytes = most_waiting_bytes
        self._wake = wake
        self._folder = Folder(
            Path(config.folder).expanduser(),
            base_sha256,
            identity,
            max_bytes=config.max_bytes,
            ttl_s=config.ttl_s,
            durable=config.durable,
        )
        self.index = Index()
        self._shelf = FileShelf(self._folder, self.index, identity)
        self._writer = Writer(self._folder, self.index, config, self._on_returned, in_thread=wake is not None)
        self._readers = Errands(READERS) if wake is not None else None
        self._ends = threading.Event()
        self._keeper: threading.Thread | None = None
        self._budget = COPIED_ON_CPU if mx.default_device() == mx.Device(mx.cpu) else COPIED_AT_ONCE
        self._waiting: dict[str, int] = {}  # bytes of what is to be written, by name
        self._leaving: deque[FilePiece] = deque()
        self._copying: _Copies | None = None
        self._copied: deque[_Copies] = deque()  # in an earlier turn
        self._returned: deque[list[WriteJob]] = deque()
        self._wanted: dict[str, Callable[[], bool]] = {}  # by name: whether a row still waits for it
        self._to_read: deque[FileEntry] = deque()
        self._reading: deque[FileEntry] = deque()  # under way or read, in the order in which they go into the cache
        self._read: dict[str, KvParcel | None] = {}
        self._upload: _Upload | None = None
        self._dropped = 0
        self.hits = self.hit_tokens = 0
        self._start()

    def _start(self) -> None:
        if self._wake is None:
            self._open()
            return
        self._keeper = threading.Thread(target=self._keep, name="kv-disk-keeper", daemon=True)
        self._keeper.start()

    def _open(self) -> None:
        try:
            self._folder.open(parents=True)
        except OSError as error:
            reason = f"{type(error).__name__}: {error.strerror or error}"
            log.warning("kv.disk_unusable folder=%s reason=%r", self._config.folder, reason)
            return
        self._shelf.look()
        log.info("kv.disk_open folder=%s files=%d bytes=%d", self._config.folder, len(self.index), self._folder.bytes)

    def _keep(self) -> None:
        """In a thread: look around for what other workers write, and for what is too old."""
        self._open()
        if self._wake is not None:
            self._wake()  # an idle engine reports its folder only then
        looked = 0
        while not self._ends.wait(LOOK_EVERY_S):
            try:
                self._shelf.look()
                looked += 1
                if looked % int(EXPIRE_EVERY_S / LOOK_EVERY_S) == 0:
                    self._shelf.expire()
            except Exception:
                log.exception("kv.disk_keeper_failed")

    @property
    def stats(self) -> DiskStats:
        """Counters and sizes of the folder at this moment."""
        return DiskStats(
            folder_id=self._folder.id,
            bytes=self._folder.bytes,
            limit_bytes=self._config.max_bytes,
            files=len(self.index),
            waiting=len(self._waiting),
            hits=self.hits,
            hit_tokens=self.hit_tokens,
            written_bytes=self._writer.written_bytes,
            evicted=self._folder.evicted,
            dropped=self._dropped + self._writer.dropped,
            errors=self._shelf.errors + self._writer.errors,
        )

    @property
    def busy(self) -> bool:
        """True if the engine's thread has something to do for the tier."""
        can_read = bool(self._to_read) and len(self._reading) < READ_AHEAD
        has_read = bool(self._reading) and self._reading[0].name in self._read
        return bool(self._leaving or self._copying or self._copied or has_read or can_read)

    # -- out

    def offer_blocks(self, keys: list[bytes], cut: SlabCut, version: str, weights: str) -> None:
        """Write blocks that lie in a slab, but for those that are on disk."""
        size = self._blocks_a_piece(cut)
        for at in range(0, len(keys), size):
            part = keys[at : at + size]
            if all(self.index.block(key) for key in part):
                continue
            label = Label(self._identity, tuple(part), version, weights)
            start = cut.start + at * self._block_size
            piece = SlabCut(cut.slab, cut.row, start, len(part) * self._block_size)
            self._offer(FilePiece(label, piece, None, piece.nbytes))

    def offer_snapshot(
        self,
        key: bytes,
        tail: tuple[int, ...],
        length: int,
        state: State,
        rest: SlabCut | None,
        version: str,
        weights: str,
    ) -> None:
        """Write a snapshot, unless it is on disk."""
        label = Label(self._identity, (key,), version, weights, tail, length)
        nbytes = sum(array.nbytes for arrays in state.layers() for array in arrays) + (rest.nbytes if rest else 0)
        self._offer(FilePiece(label, rest, state, nbytes))

    def _blocks_a_piece(self, cut: SlabCut) -> int:
        arrays = [array for arrays in cut.slab.layers for array in arrays]
        sizes = [self._block_size * array.nbytes // (array.shape[0] * array.shape[2]) for array in arrays]
        if not sizes:
            return max(1, cut.length // self._block_size)
        most = min(PIECE_BYTES, self._most_waiting_bytes // FEWEST_WAITING)
        return max(1, min(most // sum(sizes), ARRAY_BYTES // max(sizes)))

    def _offer(self, piece: FilePiece) -> None:
        name = piece.label.name
        if name in self.index or name in self._waiting:
            return
        waiting = sum(self._waiting.values())
        is_full = len(self._waiting) >= self._config.queue_size or waiting + piece.nbytes > self._most_waiting_bytes
        if is_full and not self._ends.is_set():
            self._dropped += 1
            return
        self._waiting[name] = piece.nbytes
        self._leaving.append(piece)

    def _copy_some(self) -> None:
        """Hand over what was copied before, and copy some more."""
        while self._copied:
            self._hand_over(self._copied.popleft())
        left = self._budget
        begun: list[mx.array] = []
        while left > 0 and (self._copying or self._leaving):
            copies = self._copying = self._copying or _copies_of(self._leaving.popleft())
            for array in copies.left:
                copies.copies.append(as_bytes(array))
                begun.append(copies.copies[-1])
                left -= array.nbytes
                if left <= 0:
                    break
            else:
                self._copying = None
                self._copied.append(copies)
        if begun:
            mx.async_eval(begun)  # type: ignore[no-untyped-call]

    def _hand_over(self, done: _Copies) -> None:
        arrays = (array for leaf in (*done.cut, *done.states) for array in leaf)
        host = arranged(map(on_host, arrays, done.copies), done.cut, done.states)
        label = done.piece.label
        waits = sum(self._waiting.values()) > self._most_waiting_bytes // 2 or 2 * len(self._waiting) > (
            self._config.queue_size
        )
        self._writer.offer(WriteJob(label.name, KvParcel(label, *host), done.copies), urgent=waits)

    def _on_returned(self, jobs: list[WriteJob]) -> None:
        self._returned.append(jobs)
        if self._wake is not None:
            self._wake()

    def _take_back(self) -> None:
        while self._returned:
            for job in self._returned.popleft():
                self._waiting.pop(job.name, None)

    # -- in

    def want(self, entry: FileEntry, is_wanted: Callable[[], bool]) -> None:
        """Read a file, unless it is no longer wanted when its turn comes; `take` reports it."""
        if entry.name in self._wanted:
            before = self._wanted[entry.name]
            self._wanted[entry.name] = lambda: before() or is_wanted()
            return
        self._wanted[entry.name] = is_wanted
        self._to_read.append(entry)

    def _read_some(self) -> None:
        while self._to_read and len(self._reading) < READ_AHEAD:
            entry = self._to_read.popleft()
            if not self._wanted[entry.name]():
                del self._wanted[entry.name]
                continue
            self._reading.append(entry)
            if self._readers is None:
                self._fetch(entry)
            else:
                self._readers.run(lambda entry=entry: self._fetch(entry))  # type: ignore[misc]

    def _fetch(self, entry: FileEntry) -> None:
        parcel: KvParcel | None = None
        try:
            parcel = self._shelf.fetch(entry)
        finally:
            self._read[entry.name] = parcel
            if self._wake is not None:
                self._wake()

    def _take_some(self) -> Iterator[tuple[FileEntry, Layers | None, Layers]]:
        """Files that have come, with their arrays; None: it cannot be used."""
        until = time.perf_counter() + UPLOAD_S
        while self._reading and self._reading[0].name in self._read:
            entry = self._reading[0]
            parcel = self._read[entry.name]
            if parcel is None:
                yield self._taken(entry, None, [])
                continue
            upload = self._upload = self._upload or _Upload(entry, parcel, [])
            for host in list(upload.parcel.arrays)[len(upload.arrays) :]:
                upload.arrays.append(as_array(host))
                if time.perf_counter() > until:
                    break
            if len(upload.arrays) == sum(1 for _ in upload.parcel.arrays):
                self._upload = None
                mx.async_eval(upload.arrays)  # type: ignore[no-untyped-call]
                cut, states = arranged(upload.arrays, upload.parcel.cut, upload.parcel.states)
                yield self._taken(upload.entry, cut, states)
            if time.perf_counter() > until:
                return

    def _taken(self, entry: FileEntry, cut: Layers | None, states: Layers) -> tuple[FileEntry, Layers | None, Layers]:
        self._reading.popleft()
        del self._read[entry.name]
        self._wanted.pop(entry.name, None)
        return entry, cut, states

    # -- the engine's thread

    def work(self) -> Iterator[tuple[FileEntry, Layers | None, Layers]]:
        """A little of everything, between two steps; the files that have come by it: cut leaves' arrays, states."""
        yield from self._take_some()
        self._read_some()
        self._copy_some()
        self._take_back()

    def remove(self, entry: FileEntry) -> None:
        """A file is of no use to anybody."""
        self._forget([entry.name])

    def give_up(self) -> None:
        """Drop what is on its way in the engine's thread."""
        for piece in (*self._leaving, *(each.piece for each in (self._copying, *self._copied) if each)):
            self._waiting.pop(piece.label.name, None)
        self._leaving.clear()
        self._copied.clear()
        self._copying = None
        for entry in self._to_read:
            self._wanted.pop(entry.name, None)
        self._to_read.clear()
        if self._upload is not None:
            self._taken(self._upload.entry, None, [])
            self._upload = None

    def clear(self) -> None:
        """Forget everything, on disk, too."""
        self.give_up()
        self._writer.forget()
        self._forget(self.index.names)

    def _forget(self, names: list[str]) -> None:
        self.index.discard(names)
        if self._readers is None:
            self._shelf.forget(names)
        else:
            self._readers.run(lambda: self._shelf.forget(names))

    def close(self, offer_all: Callable[[], Any] | None = None) -> None:
        """Write what waits, and what `offer_all` offers, as far as LAST_S takes us; then end."""
        until = time.monotonic() + LAST_S
        self._ends.set()
        if self._readers is not None:
            self._readers.close()
        if offer_all is not None:
            offer_all()
            while (self._leaving or self._copying or self._copied) and time.monotonic() < until:
                self._copy_some()
        self._writer.close(max(0.0, until - time.monotonic()))
        self._take_back()
        self._folder.close()


def _copies_of(piece: FilePiece) -> _Copies:
    cut = piece.cut.layers(piece.cut.length) if piece.cut else []
    states = piece.state.layers() if piece.state else []
    return _Copies(piece, cut, states, (array for arrays in (*cut, *states) for array in arrays), [])
