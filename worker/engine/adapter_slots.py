"""Adapter versions for the rows of the batch: resolve, hold, load between decode steps, switch followers.

A reference is "name@k" (that version), or "name": pinned at admission to the version that is the latest then, or,
when the row follows, the newest that is loaded at the dispatch of each forward. Weighted splits are decided by the api.

Life of a version: `provide` says where its file is -> wanted by a row or by `point` -> read in the reader's thread ->
written into a free slot between decode steps (`work`) -> one remap, by which followers switch.

Invariants. Lives in the engine's thread; `stats` may be read anywhere. A slot is held by every row that was admitted
with its version, from `ready` (or the end of the load that it waited for) to `release`. A following row keeps what it
computes with until a newer version is loaded, and moves its hold with the remap.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_model.config import SlotConfig
from mlx_model.device import on_cpu
from mlx_model.heads.head import Heads
from mlx_model.loader import LoadedModel
from mlx_model.lora.reader import AdapterReader, ReadAdapter
from mlx_model.lora.stacks import AdaptedModel
from mlx_model.networks.network import Network
from shared.adapters import AdapterManifest, AdapterRef, version_id
from shared.errors import (
    AdapterRejectedError,
    EngineError,
    InvalidRequestError,
    ParallmError,
    UnknownAdapterError,
    UnsupportedParameterError,
)
from worker.engine.batch.adapters import AdapterStats
from worker.engine.batch.row import Row
from worker.engine.slot_table import SlotTable

log = logging.getLogger(__name__)

SLICE_BYTES = 64 << 20  # copied between two decode steps on a GPU, where the clock says nothing about queued work


@dataclass
class _Claim:
    """An adapter reference of one row and whether its slot is held."""

    name: str
    version: str  # what it is held at, or would be; of a follower it changes
    follows: bool
    held: bool = False


@dataclass
class _Load:
    """A version on its way into its slot."""

    version: str
    steps: Iterator[list[mx.array]]
    dora: bool
    began: float  # monotonic
    heads: Heads
    network: Network | None


class AdapterSlots:
    """The engine's `Adapters`. `wake` makes the engine take a turn; `on_change` hears of every load and failure."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: SlotConfig,
        wake: Callable[[], None],
        on_change: Callable[[AdapterStats], None] = lambda stats: None,
    ) -> None:
        dtype: mx.Dtype = getattr(mx, config.dtype or loaded.card.dtype)
        fixed = config.max_rank if loaded.kv.apart else 0
        self._adapted = AdaptedModel(loaded.model, config.slots + 1, dtype, loaded.whole, loaded.tuning, fixed)
        self._table = SlotTable(config.slots)
        self._reader = AdapterReader(self._adapted, config.max_rank, loaded.card.hidden_size, self._on_read)
        self._wake, self._on_change = wake, on_change
        self._files: dict[str, tuple[Path, AdapterManifest]] = {}
        self._latest: dict[str, str] = {}  # name -> version that the store points at
        self._serving: dict[str, str] = {}  # name -> version that followers use
        self._failed: dict[str, ParallmError] = {}
        self._claims: dict[Row, _Claim] = {}
        self._read: deque[tuple[AdapterManifest, ReadAdapter | ParallmError]] = deque()
        self._ranks = loaded.ranks
        self._read_here: dict[str, tuple[AdapterManifest, ReadAdapter]] = {}  # until all ranks have read them
        self._loads: deque[_Load] = deque()
        self._dora: set[str] = set()
        self._heads: dict[str, Heads] = {}  # of loaded versions
        self._networks: dict[str, Network] = {}  # loaded versions that are one
        self._moved: list[Row] = []
        self._epoch = 0  # changes when a follower's version may have changed
        self._selected: tuple[tuple[Row, ...], int] = ((), -1)
        self._versions: tuple[str, ...] = ()
        self._is_cpu = on_cpu()
        self._changed = False
        self._bytes = 0
        self._swaps, self._swap_s = 0, 0.0
        self.stats = AdapterStats()

    # -- orders of the worker

    def provide(self, path: Path, manifest: AdapterManifest) -> None:
        """The file of a version is here, and stays until `withdraw`."""
        self._files[manifest.id] = (path, manifest)
        self._failed.pop(manifest.id, None)

    def withdraw(self, version: str) -> None:
        """The file of a version goes; what is loaded stays until its slot is needed."""
        self._files.pop(version, None)

    def point(self, name: str, version: int) -> None:
        """The latest version of `name`, 0: none any more. Followers get it as soon as it is loaded."""
        if version == 0:
            self._latest.pop(name, None)
            return
        wanted = self._latest[name] = version_id(name, version)
        serving = self._serving.get(name, "")
        if self._table.is_loaded(wanted):
            self._serve(name)
        elif wanted in self._files and (self._table.is_loaded(serving) or self._table.has_empty()):
            self._table.want(wanted, urgent=self._table.holds(serving) > 0)
            self._start_loads()

    # -- what the engine asks

    def admit(self, row: Row) -> None:
        """Resolve the row's adapter reference; the version is loaded if it has to be."""
        if not row.spec.adapter:
            return
        ref = AdapterRef.parse(row.spec.adapter)
        if len(ref.choices) > 1:
            raise InvalidRequestError("an adapter split is decided before a sequence is queued", param="adapter")
        choice = ref.choices[0]
        follows = choice.follows and row.spec.adapter_policy == "follow"
        if follows and row.spec.kind == "head":
            raise UnsupportedParameterError("a head is read by the version that it was chosen for, and follows none")
        version = version_id(choice.name, choice.version) if choice.version else self._latest.get(choice.name, "")
        if not version or not (version in self._files or self._table.is_loaded(version)):
            raise UnknownAdapterError(f"adapter {row.spec.adapter!r} is not known on this worker")
        self._check_nature(row, version)
        self._claims[row] = _Claim(choice.name, version, follows)

    def _check_nature(self, row: Row, version: str) -> None:
        file = self._files.get(version)
        is_network = version in self._networks if file is None else file[1].network is not None
        if is_network != (row.spec.kind == "network"):
            other = "a network and no adapter of a language model" if is_network else "no network"
            raise InvalidRequestError(f"{version} is {other}", param="adapter")

    def ready(self, row: Row) -> bool:
        """Hold the slot when the version is in one; else want it."""
        claim = self._claims.get(row)
        if claim is None or claim.held:
            return True
        if claim.follows:
            claim.version = self._followed(claim.name)
        if error := self._failed.get(claim.version):
            raise error
        if self._table.is_open(claim.version):
            self._hold(claim)
            return True
        if claim.version not in self._files and not self._table.is_loaded(claim.version):
            raise UnknownAdapterError(f"adapter {claim.version} is not on this worker any more")
        self._table.want(claim.version, urgent=True)
        self._start_loads()
        return False

    def prefill_key(self, row: Row) -> str:
        """Version, and whether it may change under way."""
        claim = self._claims.get(row)
        return "" if claim is None else f"{claim.version} {'follows' if claim.follows else 'pinned'}"

    def version(self, row: Row) -> str:
        """Same as `select` for this row alone, without side effects."""
        claim = self._claims.get(row)
        return claim.version if claim is not None and claim.held else ""

    def heads(self, row: Row) -> Heads:
        """Heads that came with the version's weights."""
        return self._heads.get(self.version(row), {})

    def network(self, row: Row) -> Network | None:
        """The network that came with the version, None if the version adapts the base."""
        return self._networks.get(self.version(row))

    def release(self, row: Row) -> None:
        """Give up the hold, or the wish."""
        claim = self._claims.pop(row, None)
        if claim is None:
            return
        if claim.held:
            self._table.release(claim.version)
        elif not any(other.version == claim.version and not other.held for other in self._claims.values()):
            self._table.unwant(claim.version)
        self._changed = True
        self._start_loads()

    def select(self, rows: tuple[Row, ...]) -> tuple[str, ...]:
        """Slots and versions of the rows, worked out when the batch or a version has changed."""
        if self._selected[0] is rows and self._selected[1] == self._epoch:
            return self._versions
        claims = [self._claims.get(row) for row in rows]
        versions = ["" if claim is None or not claim.held else claim.version for claim in claims]
        slots = [self._table.slot_of(version) if version else 0 for version in versions]
        self._adapted.select(slots, any(version in self._dora for version in versions))
        self._selected, self._versions = (rows, self._epoch), tuple(versions)
        return self._versions

    def take_moved(self) -> list[Row]:
        """Followers with kv_on_swap "recompute" that have just switched."""
        moved, self._moved = self._moved, []
        return moved

    def work(self, budget_s: float) -> bool:
        """Write slices of the slots being loaded until the time is up; True when there is more or something changed."""
        while self._read and self._ranks is None:
            self._begin_load(*self._read.popleft())
        if self._loads:
            self._write_slices(budget_s)
        if self._changed:
            self._publish()
        changed, self._changed = self._changed, False
        return changed or bool(self._loads)

    def take_read(self) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """Among several ranks: what has been read here since the last call, and what could not be."""
        read: list[str] = []
        unreadable: list[tuple[str, str]] = []
        while self._read:
            manifest, result = self._read.popleft()
            if isinstance(result, ParallmError):
                unreadable.append((manifest.id, result.message))
            else:
                self._read_here[manifest.id] = manifest, result
                read.append(manifest.id)
        return tuple(read), tuple(unreadable)

    def agree(self, read: Iterable[str], unreadable: Iterable[tuple[str, str]]) -> None:
        """Among several ranks: begin to write what all have read."""
        for version in read:
            self._begin_load(*self._read_here.pop(version))
        for version, reason in unreadable:
            self._read_here.pop(version, None)
            self._fail(version, AdapterRejectedError(reason))

    def close(self) -> None:
        """Stop the thread that reads adapters."""
        self._reader.close()

    # -- loading

    def _start_loads(self) -> None:
        while (load := self._table.next_load()) is not None:
            version, _ = load
            file = self._files.get(version)
            if file is None:
                self._table.fail_load(version)
            else:
                self._reader.read(*file)

    def _on_read(self, manifest: AdapterManifest, result: ReadAdapter | ParallmError) -> None:
        """Called in the reader's thread."""
        self._read.append((manifest, result))
        self._wake()

    def _begin_load(self, manifest: AdapterManifest, result: ReadAdapter | ParallmError) -> None:
        if isinstance(result, ParallmError):
            self._fail(manifest.id, result)
            return
        steps = self._adapted.fill(self._table.slot_of(manifest.id), result.weights)
        began, is_dora = time.monotonic(), manifest.kind == "dora"
        self._loads.append(_Load(manifest.id, steps, is_dora, began, result.heads, result.network))

    def _fail(self, version: str, error: ParallmError) -> None:
        self._failed[version] = error
        self._table.fail_load(version)
        self._changed = True
        self._start_loads()

    def _write_slices(self, budget_s: float) -> None:
        if self._is_cpu:
            mx.synchronize()  # the forward under way reads the stacks: once it is done they are written in place
        until, copied = time.perf_counter() + budget_s, 0
        if self._ranks is not None:
            until = math.inf  # all ranks write the same between the same two steps
        while self._loads and time.perf_counter() < until and copied < SLICE_BYTES:
            load = self._loads[0]
            try:
                arrays = next(load.steps, None)
                if arrays is not None and self._is_cpu:
                    mx.eval(arrays)
                elif arrays is not None:
                    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]
            except Exception as error:
                if self._ranks is not None:
                    raise  # others have written it
                log.exception("adapters.write_failed adapter=%s", load.version)
                self._loads.popleft()
                self._fail(load.version, EngineError(f"{load.version}: {type(error).__name__}: {error}"))
                continue
            if arrays is None:
                self._finish_load(self._loads.popleft())
            else:
                copied += sum(array.nbytes for array in arrays)

    def _finish_load(self, load: _Load) -> None:
        """The remap: from here on rows may use the slot."""
        self._table.finish_load(load.version)
        (self._dora.add if load.dora else self._dora.discard)(load.version)
        loaded = self._table.loaded()
        self._heads = {version: heads for version, heads in self._heads.items() if version in loaded}
        self._heads[load.version] = load.heads
        self._networks = {version: network for version, network in self._networks.items() if version in loaded}
        if load.network is not None:
            self._networks[load.version] = load.network
        for claim in self._claims.values():
            if claim.version == load.version and not claim.held:
                self._hold(claim)  # before anybody else may take the slot
        name = load.version.partition("@")[0]
        if self._latest.get(name) == load.version:
            self._serve(name)
        of_heads = (head.nbytes for heads in self._heads.values() for head in heads.values())
        self._bytes = self._adapted.nbytes + sum(of_heads) + sum(each.nbytes for each in self._networks.values())
        self._swaps += 1
        self._swap_s += time.monotonic() - load.began
        self._changed = True
        self._start_loads()

    def _serve(self, name: str) -> None:
        """Followers of `name` go over to its latest version, which is loaded."""
        version = self._serving[name] = self._latest[name]
        for row, claim in self._claims.items():
            if claim.name != name or not claim.follows or claim.version == version:
                continue
            if claim.held:
                self._table.release(claim.version)
                claim.held = False
                claim.version = version
                self._hold(claim)
                if row.spec.kv_on_swap == "recompute":
                    self._moved.append(row)
            else:
                claim.version = version
        self._epoch += 1
        self._changed = True
        self._start_loads()

    def _followed(self, name: str) -> str:
        """Version that a new follower starts with: the one that others use, else the latest."""
        serving, latest = self._serving.get(name, ""), self._latest.get(name, "")
        if latest and latest not in self._failed and not self._table.is_open(serving):
            return latest
        return serving or latest

    def _hold(self, claim: _Claim) -> None:
        self._table.hold(claim.version)
        claim.held = True
        self._changed = True

    def _publish(self) -> None:
        """Publish what is the case now."""
        before, self.stats = (
            self.stats,
            AdapterStats(
                loaded=self._table.loaded(),
                serving=dict(self._serving),
                waited_for=frozenset(claim.version for claim in self._claims.values() if not claim.held),
                failed={version: error.message for version, error in self._failed.items()},
                bytes=self._bytes,
                swaps=self._swaps,
                swap_s=self._swap_s,
            ),
        )
        news = (self.stats.loaded.keys(), self.stats.serving, self.stats.failed, self.stats.swaps)
        if news != (before.loaded.keys(), before.serving, before.failed, before.swaps):
            self._on_change(self.stats)
