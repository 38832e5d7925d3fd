"""Images' vectors in files, in the folder of `--ssd-cache-dir`: they outlive memory and the worker
(prefixes/disk/folder.py).

Invariants. Files are read and written in a thread, and no row waits for one longer than `PATIENCE_S`: an image that
does not come is encoded. A file says what it is of, and which model has computed it by which releases; one that is not
whole, or of another model, is removed. Bound, age and half-written files are the folder's, together with those of KV.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from mlx_model.config import DiskConfig
from shared.sequences import ModelCard
from worker.engine.prefixes.disk.folder import Folder
from worker.engine.prefixes.disk.reading import Errands
from worker.engine.prefixes.parcels import (
    HostArray,
    KvParcel,
    Label,
    UnusableParcelError,
    as_array,
    as_bytes,
    on_host,
    pack,
    unpack,
)

log = logging.getLogger(__name__)

PATIENCE_S = 2.0  # for a disk
MOST_BYTES = 32 << 20  # of an image: more is copied in too long a time between two steps
MOST_WAITING = 4  # files to be written; more are dropped


class Album:
    """Image vectors on disk for one engine; used in its thread only."""

    def __init__(self, config: DiskConfig, card: ModelCard, *, in_thread: bool) -> None:
        releases = [f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "mlx-vlm")]
        whole = json.dumps(["images", card.base_sha256, card.dtype, releases])
        self._identity = hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()
        self._folder = Folder(
            Path(config.folder).expanduser(),
            f"images {card.base_sha256}",
            self._identity,
            max_bytes=config.max_bytes,
            ttl_s=config.ttl_s,
            durable=False,
        )
        self._thread = Errands(1) if in_thread else None
        self._lock = threading.Lock()
        self._asked: dict[bytes, float] = {}  # until when they are waited for
        self._found: dict[bytes, HostArray | None] = {}
        self._writing: set[bytes] = set()
        self._run(lambda: self._folder.open(parents=True))

    def ask(self, key: bytes) -> None:
        """Look for an image's vectors."""
        if key not in self._asked:
            self._asked[key] = time.monotonic() + PATIENCE_S
            self._run(lambda: self._read(key))

    def waits(self, key: bytes) -> bool:
        """True if an image that was asked for may still arrive."""
        return key not in self._found and time.monotonic() < self._asked.get(key, 0.0)

    def take(self, key: bytes) -> mx.array | None:
        """The vectors [T, H] that have come of an image that was asked for, which is waited for no more."""
        with self._lock:
            self._asked.pop(key, None)
            host = self._found.pop(key, None)
        return None if host is None else as_array(host)

    def keep(self, key: bytes, vectors_TH: mx.array) -> None:
        """Write them, unless they are too many, or too many others wait."""
        if vectors_TH.nbytes > MOST_BYTES or len(self._writing) >= MOST_WAITING or key in self._writing:
            return
        flat = as_bytes(vectors_TH)
        mx.eval(flat)
        host = on_host(vectors_TH, flat)
        self._writing.add(key)
        self._run(lambda: self._write(key, host))

    def close(self) -> None:
        """Have the thread write what waits, then end; nothing waits for it."""
        if self._thread is None:
            self._folder.close()
            return
        self._thread.run(self._folder.close)
        self._thread.close()

    def _run(self, call: Callable[[], None]) -> None:
        def logged() -> None:
            try:
                call()
            except OSError as error:
                log.warning("images.disk_failed reason=%r", f"{type(error).__name__}: {error.strerror or error}")

        if self._thread is None:
            logged()
        else:
            self._thread.run(logged)

    def _label(self, key: bytes) -> Label:
        return Label(self._identity, (key,), "image")

    def _read(self, key: bytes) -> None:
        label = self._label(key)
        found: HostArray | None = None
        try:
            parcel = unpack(self._folder.read(label.name), self._identity)
            (found,) = parcel.arrays
            if parcel.label != label or len(found.shape) != 2:
                raise UnusableParcelError("it holds something else than its name says")
        except FileNotFoundError:
            return
        except (UnusableParcelError, ValueError) as error:
            found = None
            log.warning("images.disk_file_removed file=%s reason=%r", label.name, str(error))
            self._folder.remove([label.name])
        finally:
            with self._lock:
                if key in self._asked:
                    self._found[key] = found

    def _write(self, key: bytes, host: HostArray) -> None:
        try:
            packed = pack(KvParcel(self._label(key), [], [(host,)]))
            self._folder.write(self._label(key).name, [packed.head, *packed.parts])
        finally:
            self._writing.discard(key)
