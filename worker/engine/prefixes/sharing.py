"""A prefix cache that gives KV away as parcels, and takes parcels in as if they had been computed here.

Giving: `offer` says what there is of a prompt, cut into pieces of a few MB, and holds it until `drop`. A piece is
copied in two steps, `begin` and `finish`, between which the engine takes a turn, so that no row waits for the copy.
Taking: `take` stores one parcel after what is there already.

Invariants. As PrefixCache's. What goes out and comes in is plain bytes; arrays stay in the engine's thread. A parcel is
stored only where its blocks are those of the prompt that it was asked for, in the layout of this model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_model.kv.kinds import kind_of, leaves
from worker.engine.prefixes.entries import Segment, StateSnapshot, go_on_with
from worker.engine.prefixes.parcels import (
    HostArray,
    KvParcel,
    Label,
    UnusableParcelError,
    arranged,
    as_array,
    as_bytes,
    on_host,
)
from worker.engine.prefixes.prefix_cache import PrefixCache
from worker.engine.prefixes.slabs import Layers, Slab, SlabCut, State

PIECE_BYTES = 8 << 20  # of a parcel, about; one block at least
PROBE_BYTES = 1 << 20  # of the first one, by whose time the others are judged
MOST_OFFERS = 16


@dataclass(frozen=True)
class OfferedKv:
    """KV that a peer may fetch; its pieces are numbered."""

    number: int
    length: int  # ids that a hit would have with it
    sizes: list[int]


@dataclass(frozen=True)
class HeldPrompt:
    """How much of a given prompt this cache holds."""

    ids: Sequence[int]
    version: str
    keys: list[bytes]  # of all its blocks
    length: int  # that a hit would have
    blocks: int  # that are here
    resets: int  # of the cache, before


@dataclass(eq=False)
class _Piece:
    label: Label
    cut: SlabCut | None
    state: State | None = None
    bytes_of: list[mx.array] = field(default_factory=list)  # copies, once they have begun

    @property
    def layers(self) -> tuple[Layers, Layers]:
        """Layers of the cut leaves, and of the others."""
        return self.cut.layers(self.cut.length) if self.cut else [], self.state.layers() if self.state else []

    @property
    def arrays(self) -> Iterator[mx.array]:
        return (array for layers in self.layers for leaf in layers for array in leaf)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class SharedCache(PrefixCache):
    """A prefix cache whose KV other workers may have."""

    def __init__(
        self,
        limit_bytes: int,
        block_size: int,
        base_sha256: str,
        new_kv: Sequence[Any],
        identity: str,
        shares: Sequence[int] = (),
    ) -> None:
        super().__init__(limit_bytes, block_size, base_sha256, new_kv, shares)
        self.identity = identity
        self._cut_leaves = sum(kind_of(leaf).is_cut for leaf in leaves(new_kv))
        self._offers: dict[int, list[_Piece]] = {}
        self._resets = 0
        self._numbers = itertools.count(1)

    def held(self, ids: Sequence[int], version: str, at_most: int) -> HeldPrompt:
        """Look a prompt up; a hit has `at_most` ids at most."""
        keys = list(self._keys.chain(ids, version))
        blocks = sum(self._find(iter(keys)).values())
        return HeldPrompt(ids, version, keys, self.known(ids, version, at_most), blocks, self._resets)

    def clear(self) -> None:
        """Forget everything: what is on its way out or in, too."""
        self._resets += 1
        self._offers.clear()
        super().clear()

    # -- giving

    def offer(
        self, ids: Sequence[int], version: str, known: int, blocks: int, at_most: int, most_bytes: int
    ) -> OfferedKv | None:
        """Reserve KV of these ids beyond `known` ones and `blocks` that the peer has; None if there is none."""
        if not self._limit or len(self._offers) >= MOST_OFFERS:
            return None
        runs, snapshot, length = self._beginning(ids, version, at_most)
        if length <= known:
            return None
        self._touch(list(runs), snapshot)
        pieces, left = list(self._pieces(runs, blocks, version)), most_bytes
        if snapshot is not None:
            label = Label(self.identity, (snapshot.key,), version, "", snapshot.tail, snapshot.length)
            pieces.append(_Piece(label, snapshot.rest, snapshot.state))
        fitting = list(itertools.takewhile(lambda total: total <= left, itertools.accumulate(p.nbytes for p in pieces)))
        if len(fitting) < len(pieces):
            if snapshot is not None or not fitting:
                return None
            pieces = pieces[: len(fitting)]
            length = self._block_size * (blocks + sum(len(piece.label.keys) for piece in pieces))
        number = next(self._numbers)
        self._offers[number] = pieces
        return OfferedKv(number, length, [piece.nbytes for piece in pieces])

    def _pieces(self, runs: dict[Segment, int], skipped: int, version: str) -> Iterator[_Piece]:
        most = PROBE_BYTES
        for segment, blocks in runs.items():
            at, skipped = min(skipped, blocks), max(0, skipped - blocks)
            block_bytes = segment.cut.nbytes // max(1, len(segment.keys))
            while at < blocks:
                count = min(blocks - at, max(1, most // block_bytes) if block_bytes else blocks)
                start = segment.cut.start + at * self._block_size
                cut = SlabCut(segment.cut.slab, segment.cut.row, start, count * self._block_size)
                yield _Piece(Label(self.identity, tuple(segment.keys[at : at + count]), version), cut)
                at, most = at + count, PIECE_BYTES

    def begin(self, number: int, at: int) -> None:
        """Begin to copy a piece of an offer; LookupError when that was forgotten."""
        piece = self._offers[number][at]
        piece.bytes_of = [as_bytes(array) for array in piece.arrays]
        mx.async_eval(piece.bytes_of)  # type: ignore[no-untyped-call]

    def finish(self, number: int, at: int) -> KvParcel:
        """A piece whose copy has begun, in memory of its own."""
        piece = self._offers[number][at]
        cut, states = piece.layers
        own = (_own(on_host(array, copy)) for array, copy in zip(piece.arrays, piece.bytes_of, strict=True))
        parcel = KvParcel(piece.label, *arranged(own, cut, states))
        piece.bytes_of = []
        return parcel

    def drop(self, number: int) -> None:
        """Drop an offer, which is no longer fetched."""
        self._offers.pop(number, None)

    # -- taking

    def take(self, prompt: HeldPrompt, parcel: KvParcel) -> None:
        """Store a parcel of a prompt, if what comes before it is here and it is not. UnusableParcelError."""
        self._check(parcel, prompt)
        arrays = [as_array(host) for host in parcel.arrays]
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]
        cut, states = arranged(arrays, parcel.cut, parcel.states)
        self.put(parcel.label, prompt.keys, cut, states)
        self._shrink()

    def put(self, label: Label, keys: list[bytes], cut: Layers, states: Layers) -> None:
        """Store arrays that belong to a prompt of these keys, if what comes before them is here and they are not."""
        runs = self._find(iter(keys))
        known = sum(runs.values())
        if label.tail is not None:
            count = 0 if label.keys[0] == self._keys.root(label.version) else keys.index(label.keys[0]) + 1
            if count <= known and label.tail not in self._snapshots.get(label.keys[0], {}):
                self._put_snapshot(label, cut, states, list(self._find(iter(keys[:count]))))
            return
        if known == len(keys) or keys[known] not in label.keys:
            return
        skipped, size = label.keys.index(keys[known]), self._block_size
        new = list(label.keys[skipped:])
        part = SlabCut(Slab(cut), 0, skipped * size, len(new) * size)
        self._add_segment(Segment(new, part.alone() if skipped else part, label.version), list(runs))

    def _put_snapshot(self, label: Label, cut: Layers, states: Layers, runs: list[Segment]) -> None:
        state = State(Slab(states, of_states=True), 0)
        self._positions.state_bytes = self._positions.state_bytes or state.slab.nbytes
        tail = label.tail or ()
        rest = SlabCut(Slab(cut), 0, 0, len(tail)) if cut else None
        self._add_snapshot(StateSnapshot(label.keys[0], tail, label.length, state, rest, label.version), runs)

    def _check(self, parcel: KvParcel, prompt: HeldPrompt) -> None:
        """Raise UnusableParcelError unless the parcel belongs to this prompt and the model can compute with it."""
        label, tail = parcel.label, parcel.label.tail
        if prompt.resets != self._resets:
            raise UnusableParcelError("the cache has been emptied meanwhile")
        if label.identity != self.identity or label.version != prompt.version or not label.keys:
            raise UnusableParcelError("of another model or adapter version")
        if not (self._is_of_blocks(label, prompt) if tail is None else self._is_snapshot_of(label, tail, prompt)):
            raise UnusableParcelError("of another prompt than was asked for")
        positions = len(label.keys) * self._block_size if tail is None else len(tail)
        shapes = [array.shape for leaf in parcel.cut for array in leaf]
        leaves_of = len(parcel.cut) if positions else self._cut_leaves
        if leaves_of != self._cut_leaves or any(len(s) != 4 or s[0] != 1 or s[2] != positions for s in shapes):
            raise UnusableParcelError("its arrays are not laid out as ours are")
        if bool(parcel.states) != (tail is not None):
            raise UnusableParcelError("it holds states where there are none, or lacks them")

    @staticmethod
    def _is_of_blocks(label: Label, prompt: HeldPrompt) -> bool:
        if label.keys[0] not in prompt.keys:
            return False
        at = prompt.keys.index(label.keys[0])
        return list(label.keys) == prompt.keys[at : at + len(label.keys)]

    def _is_snapshot_of(self, label: Label, tail: tuple[int, ...], prompt: HeldPrompt) -> bool:
        before = label.length - len(tail)
        at = before // self._block_size
        if before != at * self._block_size or not 0 <= at <= len(prompt.keys):
            return False
        key = prompt.keys[at - 1] if at else self._keys.root(prompt.version)
        return label.keys == (key,) and go_on_with(prompt.ids, tail, label.length)


def _own(host: HostArray) -> HostArray:
    return HostArray(host.dtype, host.shape, memoryview(bytes(host.data)))
