"""Automatic prefix cache: KV of earlier sequences, found again by the hashes of their blocks (block_keys.py).

What a sequence adds to the cache is one *segment*: the KV of those blocks that were not stored before it. A prompt that
shares some blocks of a segment hits as far as they go. Layers that cannot be cut (mlx_model/kv/kinds.py) are stored
with the blocks as *snapshots*: each holds what they had at one position, and the others' KV after the last whole block
before it. In a model with such layers a hit is the longest stored beginning that ends at a snapshot; `stops` says at
which positions of a prompt one is worth its bytes. Where all layers can be cut, a short prompt's last ids are kept,
too, as a *tail* (tails.py).

MLX arrays never change: a write after a prefix goes into a copy, so hits share the stored arrays. What comes
together lies in one slab (slabs.py), which lives as long as one part of it is used; the first hit of a part takes it
out, so that few hot prompts do not keep cold ones.

Invariants. Lives in the engine's thread. A segment's first block follows a block of another segment, its parent, or
begins the prompt. A use renews a snapshot, then its segment and then the parents, so a parent is always younger in the
order of use, and eviction, oldest first, never leaves what cannot be reached. With a kind of cache that we do not know,
or a limit of 0, nothing is stored and nothing is found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_model.kv.kinds import kind_of, leaves, restored
from worker.engine.messages import DiskStats, PrefixStats
from worker.engine.prefixes.block_keys import BlockKeys
from worker.engine.prefixes.entries import NOTHING, Prefix, Promotion, Segment, StateSnapshot, go_on_with
from worker.engine.prefixes.slabs import (
    KvRows,
    RowSpan,
    Slab,
    SlabCut,
    SlabUse,
    copy_rows,
    copy_states,
    joined,
    shares_of,
)
from worker.engine.prefixes.snapshots import SnapshotPositions
from worker.engine.prefixes.tails import Place, Tails

ENTRY_BYTES = 256  # what a block's keys take at least; in a model without cut layers it holds nothing else


@dataclass(frozen=True)
class Prompt:
    """Ids whose KV was computed with `version` from end to end; with a tenant, a whole prompt of its."""

    ids: Sequence[int]
    version: str
    tenant: str | None = None


class PrefixCache:
    """KV of sequences, up to `limit_bytes`. `new_kv` is an example of the model's caches."""

    def __init__(
        self, limit_bytes: int, block_size: int, base_sha256: str, new_kv: Sequence[Any], shares: Sequence[int] = ()
    ) -> None:
        """`shares`: as how many layers' each cache counts, where others do not count; () counts what is there."""
        kinds = [kind_of(leaf) for leaf in leaves(new_kv)]
        self._limit = limit_bytes if all(kind.is_known for kind in kinds) else 0
        self.needs_snapshots = bool(self._limit) and not all(kind.is_cut for kind in kinds)
        self.has_blocks = any(kind.is_cut for kind in kinds)
        self._new_kv = list(new_kv)
        self._cut_shares, self._state_shares = each = shares_of(new_kv, shares)
        self._block_size = block_size
        self._keys = BlockKeys(base_sha256, block_size)
        self._positions = SnapshotPositions(block_size, limit_bytes)
        self._blocks: dict[bytes, Segment] = {}
        self._snapshots: dict[bytes, dict[tuple[int, ...], StateSnapshot]] = {}
        self._order: OrderedDict[Segment | StateSnapshot, None] = OrderedDict()  # least recently used first
        self._slabs = SlabUse(each)
        self._tails = Tails(self._limit, each)
        self._hits = self._misses = self._hit_tokens = self._evicted = 0
        self._snapshot_count = self._evicted_snapshots = 0

    @property
    def stats(self) -> PrefixStats:
        return PrefixStats(
            bytes=self._slabs.bytes + self._tails.nbytes,
            blocks=len(self._blocks),
            hits=self._hits,
            misses=self._misses,
            hit_tokens=self._hit_tokens,
            evicted_blocks=self._evicted,
            snapshots=self._snapshot_count,
            snapshot_bytes=self._slabs.state_bytes,
            evicted_snapshots=self._evicted_snapshots,
            tails=len(self._tails),
        )

    @property
    def limit_bytes(self) -> int:
        """That it holds at most; 0: nothing is kept."""
        return self._limit

    @property
    def state_bytes(self) -> int:
        """Bytes of one snapshot; 0 until the first one is stored."""
        return self._positions.state_bytes

    # -- find

    def longest(self, ids: Sequence[int], version: str, at_most: int, tenants: Collection[str] = frozenset()) -> Prefix:
        """The longest cached prefix, at most `at_most` ids: what comes after it is still to be fed.

        Tails are found with tenants only: what each of them would find of its own.
        """
        is_short = len(ids) < self._block_size and (not tenants or self.needs_snapshots)
        if not self._limit or at_most < 1 or is_short:
            return Prefix()
        runs, snapshot, length = self._beginning(ids, version, at_most)
        tail = None if not tenants or length == at_most else self._tail_behind(ids, version, runs, tenants)
        if not (length or tail):
            self._misses += 1
            return Prefix()
        self._touch(list(runs), snapshot)
        self._take_out(runs, snapshot)
        parts = [segment.cut.layers(blocks * self._block_size) for segment, blocks in runs.items()]
        if tail:
            parts.append(self._tails.use(tail).layers(len(tail[2])))
            length = min(at_most, length + len(tail[2]))
        if snapshot and snapshot.rest:
            parts.append(snapshot.rest.layers(len(snapshot.tail)))
        states = snapshot.state.layers() if snapshot else []
        self._hits += 1
        self._hit_tokens += length
        prefix = Prefix(length, restored(self._new_kv, joined(parts, length), states, length))
        self._shrink()
        return prefix

    def _tail_behind(
        self, ids: Sequence[int], version: str, runs: dict[Segment, int], tenants: Collection[str]
    ) -> Place | None:
        """The longest tail of these ids after the blocks that are known; of several tenants' the shortest."""
        if self.needs_snapshots:
            return None
        segment, blocks = next(reversed(runs.items()), (None, 0))
        key = segment.keys[blocks - 1] if segment else self._keys.root(version)
        start = self._block_size * sum(runs.values())
        behind = ids[start : start + self._block_size]
        found = [place for tenant in tenants if (place := self._tails.find(key, tenant, behind))]
        return min(found, key=lambda place: len(place[2])) if len(found) == len(tenants) else None

    def known(self, ids: Sequence[int], version: str, at_most: int) -> int:
        """The length that a hit would have now."""
        return self._beginning(ids, version, at_most)[2] if self._limit else 0

    def _beginning(
        self, ids: Sequence[int], version: str, at_most: int
    ) -> tuple[dict[Segment, int], StateSnapshot | None, int]:
        """The longest stored beginning: blocks of each segment, the snapshot that it ends at, and its length."""
        keys = list(self._keys.chain(ids, version))
        if not self.needs_snapshots:
            runs = self._find(iter(keys))
            return runs, None, min(at_most, self._block_size * sum(runs.values()))
        blocks = sum(self._find(iter(keys)).values())
        for count in range(min(blocks, at_most // self._block_size), -1, -1):
            key = keys[count - 1] if count else self._keys.root(version)
            if snapshot := self._snapshot_behind(key, ids, at_most):
                return self._find(iter(keys[:count])), snapshot, snapshot.length
        return {}, None, 0

    def _snapshot_behind(self, key: bytes, ids: Sequence[int], at_most: int) -> StateSnapshot | None:
        """The longest snapshot of these ids between this block and the next one's end."""
        fitting = (
            snapshot
            for tail, snapshot in self._snapshots.get(key, {}).items()
            if snapshot.length <= at_most and go_on_with(ids, tail, snapshot.length)
        )
        return max(fitting, key=lambda snapshot: snapshot.length, default=None)

    def _find(self, keys: Iterator[bytes]) -> dict[Segment, int]:
        """The segments along a chain, as far as it is known, and how many blocks of each are shared."""
        runs: dict[Segment, int] = {}
        for key in keys:
            segment = self._blocks.get(key)
            if segment is None:
                break
            runs[segment] = runs.get(segment, 0) + 1
        return runs

    # -- a tier below (disk/tiered_cache.py); there is none here

    @property
    def busy(self) -> bool:
        """True if `work` has anything to do."""
        return False

    @property
    def disk(self) -> DiskStats:
        """Statistics of the KV files; empty without a disk tier."""
        return DiskStats()

    def promotion(self, ids: Sequence[int], version: str, at_most: int) -> Promotion:
        """Bring to memory what is known of these ids elsewhere."""
        return NOTHING

    def work(self) -> None:
        """Move a little between the tiers; called between two steps."""

    def last(self, versions: dict[str, str]) -> None:
        """Adapter versions whose KV is worth keeping elsewhere, and digests of their weights."""

    def close(self, *, keep: bool) -> None:
        """End; `keep` what is in memory, if there is a place."""

    def _added(self, entry: Segment | StateSnapshot) -> None:
        """Called when an entry has been stored."""

    def _leaves(self, entry: Segment | StateSnapshot) -> None:
        """Called before an entry is dropped for want of room."""

    # -- what is worth storing

    def worth_sharing(self, ids: Sequence[int], version: str) -> int:
        """Ids of half the prompt, in whole blocks, when they are not cached and could be; else 0."""
        half = (len(ids) // 2 // self._block_size or len(ids) // self._block_size) * self._block_size
        if not self._limit or self.known(ids, version, len(ids)) >= half:
            return 0
        return half

    def common(self, ids: Sequence[int], others: Sequence[int]) -> int:
        """The length of the whole blocks that both begin with, before the last id of either."""
        size, one, other = self._block_size, tuple(ids), tuple(others)
        blocks = (min(len(one), len(other)) - 1) // size
        starts = (at * size for at in range(blocks))
        return next((at for at in starts if one[at : at + size] != other[at : at + size]), blocks * size)

    def snapshot_positions(self, ids: Sequence[int], version: str, past: int) -> list[int]:
        """Positions of a prompt, after the first `past` ones, at which its states should be stored."""
        if not self.needs_snapshots:
            return []
        shared = self._block_size * sum(self._find(self._keys.chain(ids, version)).values())
        return self._positions.of(len(ids), past, shared)

    def lacks(self, prompt: Prompt, *, at_end: bool = False) -> bool:
        """True if `store` would add anything."""
        ids, version = prompt.ids, prompt.version
        if self._tail_of(prompt):
            return True
        if at_end and self.needs_snapshots:
            return len(ids) >= self._block_size and self.known(ids, version, len(ids)) < len(ids)
        return bool(self._limit) and any(key not in self._blocks for key in self._keys.chain(ids, version))

    # -- store

    def store(self, prompts: Sequence[Prompt], kv: KvRows, *, at_end: bool = False) -> None:
        """Keep the whole blocks of these prompts, whose KV is in these rows; snapshots, if they have read no more."""
        if not self._limit or not all(kv.layers):
            return
        snapshots = at_end and self.needs_snapshots
        left = self._store_blocks(list(range(len(prompts))), prompts, kv)
        while left and snapshots:
            left = self._store_blocks(left, prompts, kv)
        if snapshots:
            self._store_snapshots(prompts, kv)
        self._store_tails(prompts, kv)
        self._shrink()

    def _tail_of(self, prompt: Prompt) -> Place | None:
        """Key of the ids after the prompt's whole blocks, if they should be stored and are not."""
        length = len(prompt.ids) % self._block_size
        if prompt.tenant is None or self.needs_snapshots or not self._tails.takes(length, len(prompt.ids)):
            return None
        *_, key = [self._keys.root(prompt.version), *self._keys.chain(prompt.ids, prompt.version)]
        place = key, prompt.tenant, tuple(prompt.ids[len(prompt.ids) - length :])
        return None if self._tails.has(place) else place

    def _store_tails(self, prompts: Sequence[Prompt], kv: KvRows) -> None:
        new: dict[Place, RowSpan] = {}
        for prompt, row, start in zip(prompts, kv.rows, kv.starts, strict=True):
            if place := self._tail_of(prompt):
                end = start + len(prompt.ids)
                new[place] = RowSpan(row, end - len(place[2]), end)
        self._tails.add(zip(new, copy_rows(kv.layers, list(new.values())), strict=True))

    def _store_blocks(self, places: list[int], prompts: Sequence[Prompt], kv: KvRows) -> list[int]:
        """Keep what is new of the prompts at these places; those that begin with new blocks of another are left."""
        chains: list[
            tuple[list[Segment], list[bytes], str]
        ] = []  # what is known of a prompt; keys of the rest; version
        wanted: list[RowSpan] = []
        begun: set[bytes] = set()
        left: list[int] = []
        for place in places:
            keys = list(self._keys.chain(prompts[place].ids, prompts[place].version))
            parents = self._find(iter(keys))
            known = sum(parents.values())
            if known == len(keys):
                continue
            if keys[known] in begun:
                left.append(place)
                continue
            begun.add(keys[known])
            start, size = kv.starts[place], self._block_size
            part = RowSpan(kv.rows[place], start + known * size, start + len(keys) * size)
            if self._bytes_of(kv, part) <= self._limit:
                chains.append((list(parents), keys[known:], prompts[place].version))
                wanted.append(part)
        for (parents_of, keys, version), cut in zip(chains, copy_rows(kv.layers, wanted), strict=True):
            self._add_segment(Segment(keys, cut, version), parents_of)
        return left

    def _add_segment(self, segment: Segment, parents: list[Segment]) -> None:
        self._slabs.take(segment.cut)
        self._blocks.update(dict.fromkeys(segment.keys, segment))
        self._order[segment] = None
        self._touch([*parents, segment])
        self._added(segment)

    def _store_snapshots(self, prompts: Sequence[Prompt], kv: KvRows) -> None:
        """Keep the states of these rows, whose blocks are stored."""
        ends: dict[tuple[bytes, tuple[int, ...]], tuple[int, list[Segment]]] = {}
        for place, prompt in enumerate(prompts):
            keys = list(self._keys.chain(prompt.ids, prompt.version))
            key = keys[-1] if keys else self._keys.root(prompt.version)
            tail = tuple(prompt.ids[len(keys) * self._block_size :])
            runs = self._find(iter(keys))
            if sum(runs.values()) == len(keys) and tail not in self._snapshots.get(key, {}):
                ends.setdefault((key, tail), (place, list(runs)))
        places = [place for place, _ in ends.values()]
        lengths = [len(prompts[place].ids) for place in places]
        layers = kv.states(places, lengths) if places else []
        if not layers or not all(layers):
            return
        self._positions.state_bytes = Slab(layers).counted(self._state_shares) // len(places)
        if self._positions.state_bytes > self._limit:
            return
        states = copy_states(layers)
        rests = self._rests([tail for _, tail in ends], places, lengths, kv)
        for at, ((key, tail), (_, runs_of)) in enumerate(ends.items()):
            version = prompts[places[at]].version
            self._add_snapshot(StateSnapshot(key, tail, lengths[at], states[at], rests.get(at), version), runs_of)

    def _add_snapshot(self, snapshot: StateSnapshot, runs: list[Segment]) -> None:
        self._slabs.take(snapshot.state)
        if snapshot.rest:
            self._slabs.take(snapshot.rest)
        self._snapshots.setdefault(snapshot.key, {})[snapshot.tail] = snapshot
        self._snapshot_count += 1
        self._order[snapshot] = None
        self._touch(runs, snapshot)
        self._added(snapshot)

    @staticmethod
    def _rests(tails: list[tuple[int, ...]], places: list[int], lengths: list[int], kv: KvRows) -> dict[int, SlabCut]:
        """The cut leaves' KV of these tails, by their index; () has none."""
        wanted = {
            at: RowSpan(kv.rows[place], kv.starts[place] + length - len(tail), kv.starts[place] + length)
            for at, (tail, place, length) in enumerate(zip(tails, places, lengths, strict=True))
            if tail and kv.layers
        }
        return dict(zip(wanted, copy_rows(kv.layers, list(wanted.values())), strict=True))

    # -- room

    def clear(self) -> None:
        """Forget everything that is cached."""
        self._tails.clear()
        while self._order:
            self._evict()

    def _take_out(self, runs: dict[Segment, int], snapshot: StateSnapshot | None) -> None:
        """Copy what a hit uses out of slabs that others share."""
        for segment in runs:
            segment.cut = self._slabs.alone(segment.cut)
        if snapshot:
            snapshot.state = self._slabs.alone(snapshot.state)
            snapshot.rest = snapshot.rest and self._slabs.alone(snapshot.rest)

    def _shrink(self) -> None:
        while self._slabs.bytes + self._tails.nbytes > self._limit or len(self._blocks) > self._limit // ENTRY_BYTES:
            self._leaves(next(iter(self._order)))
            self._evict()

    def _bytes_of(self, kv: KvRows, part: RowSpan) -> int:
        return SlabCut(Slab(kv.layers), part.row, part.start, part.length).counted(self._cut_shares)

    def _touch(self, chain: list[Segment], snapshot: StateSnapshot | None = None) -> None:
        """Renew a snapshot, and then the segments before it, parents last."""
        if snapshot:
            self._order.move_to_end(snapshot)
        for segment in reversed(chain):
            self._order.move_to_end(segment)

    def _evict(self) -> None:
        oldest, _ = self._order.popitem(last=False)
        if isinstance(oldest, Segment):
            for key in oldest.keys:
                del self._blocks[key]
            self._slabs.release(oldest.cut)
            self._evicted += len(oldest.keys)
            return
        behind = self._snapshots[oldest.key]
        del behind[oldest.tail]
        if not behind:
            del self._snapshots[oldest.key]
        self._slabs.release(oldest.state)
        if oldest.rest:
            self._slabs.release(oldest.rest)
        self._snapshot_count -= 1
        self._evicted_snapshots += 1
