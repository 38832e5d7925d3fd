"""KV of several rows, copied out of the running batch together.

Row by row a copy takes two operations per layer and row. On a GPU, where operations and not bytes are what a decode
step costs, that was a tenth of a burst's time (128 prompts of 128 tokens, 28 layers: 0.27 s). A slab takes one an
array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any, TypeVar

import mlx.core as mx

from mlx_model.kv.kinds import Arrays, kind_of, leaves, lie_apart, whole

Layers = list[Arrays]  # of each leaf: arrays [rows, ...]; of a cut one [rows, heads, positions, dim]
Shares = tuple[Sequence[int], Sequence[int]]  # as often as each leaf counts: of those that are cut, of the others


@dataclass(frozen=True)
class KvRows:
    """Rows of KV as a batch holds them: which of its rows, and at which position the ids of each begin."""

    layers: Layers  # of the leaves that are cut at any length
    rows: list[int]
    starts: list[int]
    others: list[Any] = field(default_factory=list)  # the leaves that are not cut
    others_rows: list[int] = field(default_factory=list)  # the same rows, in those leaves

    @classmethod
    def of(cls, caches: Sequence[Any], rows: list[int] | None = None, starts: list[int] | None = None) -> KvRows:
        """Some rows of batched caches, or the caches of one row."""
        rows, starts, of_batch = rows or [0], starts or [0], rows or [0]
        if lie_apart(caches):
            caches, starts = whole(caches, rows, starts)
            rows = list(range(len(rows)))
        cut, others = [], []
        for leaf in leaves(caches):
            kind = kind_of(leaf)
            if kind.is_cut:
                cut.append(kind.arrays(leaf))
            else:
                others.append(leaf)
        return cls(cut, rows, starts, others, of_batch)

    def states(self, places: Sequence[int], lengths: list[int]) -> Layers:
        """State of the other leaves for the rows at `places`, after `lengths` ids."""
        rows = [self.others_rows[place] for place in places]
        return [kind_of(leaf).state(leaf, rows, lengths) for leaf in self.others]


@dataclass(eq=False)
class Slab:
    """A copy of some rows, which `users` cuts refer to."""

    layers: Layers
    users: int = 0
    of_states: bool = False

    @property
    def nbytes(self) -> int:
        return self.counted(())

    def counted(self, shares: Sequence[int]) -> int:
        """Bytes, each leaf as often as its share says; () once."""
        each = [sum(array.nbytes for array in arrays) for arrays in self.layers]
        return sum(map(mul, each, shares)) if shares else sum(each)


@dataclass(frozen=True)
class RowSpan:
    """Positions `start` to `end` of row `row` of a batch."""

    row: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class SlabCut:
    """One row's positions in a slab."""

    slab: Slab
    row: int
    start: int
    length: int

    def layers(self, length: int) -> Layers:
        """The first `length` positions, [1, heads, length, dim]; views, not copies."""
        rows, positions = slice(self.row, self.row + 1), slice(self.start, self.start + length)
        return [tuple(array[rows, :, positions] for array in arrays) for arrays in self.slab.layers]

    @property
    def nbytes(self) -> int:
        """Bytes that it would take alone."""
        return self.counted(())

    def counted(self, shares: Sequence[int]) -> int:
        """The same, each leaf as often as its share says; () once."""
        each = [
            sum(array.nbytes // (array.shape[0] * array.shape[2]) for array in arrays) for arrays in self.slab.layers
        ]
        return self.length * (sum(map(mul, each, shares)) if shares else sum(each))

    def alone(self) -> SlabCut:
        """A copy that keeps no other row alive."""
        return SlabCut(Slab(_copied(self.layers(self.length))), 0, 0, self.length)


@dataclass(frozen=True)
class State:
    """State of one row's other leaves at one position, in a slab."""

    slab: Slab
    row: int

    def layers(self) -> Layers:
        """Arrays of this row alone; views."""
        return [tuple(array[self.row : self.row + 1] for array in arrays) for arrays in self.slab.layers]

    def alone(self) -> State:
        """A copy that keeps no other row alive."""
        return State(Slab(_copied(self.layers()), of_states=True), 0)


P = TypeVar("P", SlabCut, State)


class SlabUse:
    """Bytes of the slabs that one holder uses parts of: a slab counts while any part of it is used."""

    def __init__(self, shares: Shares = ((), ())) -> None:
        self._shares = shares
        self.bytes = 0
        self.state_bytes = 0  # of them, of states

    def take(self, part: SlabCut | State) -> None:
        """Count one more user of a part's slab."""
        if not part.slab.users:
            self._count(part.slab, 1)
        part.slab.users += 1

    def release(self, part: SlabCut | State) -> None:
        """Count one user less; a slab without users is dropped."""
        part.slab.users -= 1
        if not part.slab.users:
            self._count(part.slab, -1)

    def alone(self, part: P) -> P:
        """A part that is used, in a slab that no other one is in."""
        if part.slab.users < 2:
            return part
        copy = part.alone()
        self.take(copy)
        self.release(part)
        return copy

    def _count(self, slab: Slab, sign: int) -> None:
        nbytes = slab.counted(self._shares[slab.of_states])
        self.bytes += sign * nbytes
        if slab.of_states:
            self.state_bytes += sign * nbytes


def copy_states(layers: Layers) -> list[State]:
    """A copy of each row of these."""
    slab = Slab(_copied(layers), of_states=True)
    return [State(slab, row) for row in range(layers[0][0].shape[0])]


def copy_rows(layers: Layers, wanted: Sequence[RowSpan]) -> list[SlabCut]:
    """Copy parts of a batch's rows; those of like length share a slab, so that padding never doubles it."""
    cuts: dict[RowSpan, SlabCut] = {}
    left = sorted(wanted, key=lambda part: -part.length)
    while left:
        together = [part for part in left if 2 * part.length >= left[0].length]
        low, high = min(part.start for part in together), max(part.end for part in together)
        if high - low > 2 * left[0].length:  # they lie far apart
            together, low, high = left[:1], left[0].start, left[0].end
        slab = Slab(_copied(_taken(layers, [part.row for part in together], low, high)))
        for place, part in enumerate(together):
            cuts[part] = SlabCut(slab, place, part.start - low, part.length)
        left = [part for part in left if part not in cuts]
    return [cuts[part] for part in wanted]


def _taken(layers: Layers, rows: list[int], low: int, high: int) -> Layers:
    parts = [tuple(array[..., low:high, :] for array in arrays) for arrays in layers]
    if rows == [0] and all(array.shape[0] == 1 for arrays in layers for array in arrays):
        return parts
    index = mx.array(rows)
    return [tuple(part[index] for part in arrays) for arrays in parts]


def _copied(layers: Layers) -> Layers:
    """A slice would keep the whole batch's KV alive. Nothing waits for the copies."""
    copies = [tuple(mx.contiguous(array) for array in arrays) for arrays in layers]
    mx.async_eval(copies)  # type: ignore[no-untyped-call]
    return copies


def shares_of(new_kv: Sequence[Any], shares: Sequence[int]) -> Shares:
    """Those of the caches that the leaves are in; () counts each leaf once."""
    found: tuple[list[int], list[int]] = [], []
    for cache, share in zip(new_kv, shares, strict=True) if shares else ():
        for leaf in leaves([cache]):
            found[not kind_of(leaf).is_cut].append(share)
    return found


def joined(parts: list[Layers], length: int) -> Layers:
    """The first `length` positions of consecutive parts of each cut leaf."""
    return [
        tuple(_concatenated(list(arrays))[..., :length, :] for arrays in zip(*leaf, strict=True))
        for leaf in zip(*parts, strict=True)
    ]


def _concatenated(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
