"""Linear layers, embeddings and expert layers whose rows may each use another adapter.

Weights of all slots are stacked per group of linears that read the same input: A [S, in, J*R] and B_j [S, R, out_j]
for J members and rank R, the adapter's scale folded into B. Slot 0 is the base: zeros. DoRA adds a gain per slot, m /
||W + scale B A|| [S, out] in fp32 (arXiv 2402.09353; mlx_lm/tuner/dora.py), 1 for all others.

Invariants. A batch on the base alone calls the plain layer. A group computes for all its members when the first of them
is called and hands the others their part if they are called with the very same array; any other call is computed by
itself, so grouping changes the speed and never the result. Arrays are replaced, never written while a forward that was
dispatched reads them (MLX copies on write).

In the dtype of x, sums by plain operations equal mlx-lm's LoRALinear bit by bit as long as scale is a power of two and
the stack has the adapter's dtype: mlx-lm multiplies by scale at the end. The fused kernels keep x A in fp32, where
mlx-lm rounds it to the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_model.device import on_cpu, on_cuda
from mlx_model.joined import joined_of
from mlx_model.lora.deltas import Deltas, Held, Kernel, times_of_slots
from mlx_model.routing import Routing
from mlx_model.sites import Site, group_of, partial_sums

SMALLEST_RANK = 8


@dataclass
class RowSlots:
    """The slots of the forward that is being built; set before the model is called. One for all stacks of a model."""

    slots_B: mx.array | None = None  # uint32, one per row; None: all rows on the base
    dora: bool = False  # whether any row uses DoRA
    kernel: Kernel = "gather"
    found: dict[Any, Any] = field(default_factory=dict)  # of stacks, by forwards; emptied when arrays are replaced


@dataclass(frozen=True)
class SiteWeights:
    """One adapter's weights at one site, scale folded into `b`."""

    a: mx.array  # [in, r]; of a switch [experts, in, r]
    b: mx.array  # [r, out]; of a switch [experts, r, out]
    gain: mx.array | None = None  # [out] fp32, of an embedding [ids]; DoRA only

    @property
    def rank(self) -> int:
        return int(self.b.shape[-2])


def best_kernel(dtype: mx.Dtype) -> Kernel | None:
    """The kernel of this back end as measured; None: to be timed (Metal)."""
    if on_cpu():
        return "gather" if dtype == mx.float32 else "take"  # gather_mm on a CPU takes fp32 only
    return "fused" if on_cuda() else None


def padded_rank(rank: int) -> int:
    """The next power of two from 8 on: what the fused kernels take."""
    return max(SMALLEST_RANK, 1 << (rank - 1).bit_length())


class Stack:
    """The slots' weights of one site; a group of linears is one too (`LinearGroup`)."""

    def __init__(self, sites: Sequence[Site], rows: RowSlots, slots: int, dtype: mx.Dtype) -> None:
        self.sites = list(sites)
        self.rows = rows
        self.slots = slots
        self.dtype = dtype
        self.rank = 0
        self.a: mx.array | None = None
        self.bs: list[mx.array] = []
        self.gains: list[mx.array | None] = []  # [S, out] fp32; None: no DoRA at this member yet
        self._written: set[int] = set()

    def reserve(self, rank: int) -> None:
        """Make room for a rank; what is there keeps its place."""
        rank = padded_rank(rank)
        if rank <= self.rank:
            return
        self.rows.found.clear()
        members = len(self.sites)
        if self.a is None:
            self.a = mx.zeros((self.slots, *self._shape_a(self.sites[0]), members * rank), self.dtype)
            self.bs = [mx.zeros((self.slots, *self._shape_b(site, rank)), self.dtype) for site in self.sites]
            self.gains = [None] * members
        else:
            self.a = _widen(self.a, members, self.rank, rank)
            self.bs = [_pad(b, -2, rank) for b in self.bs]
        self.rank = rank

    def write(self, slot: int, weights: Sequence[SiteWeights | None]) -> bool:
        """Fill a slot, one entry per site; zeros where there is none. Whether anything changed."""
        given = [each for each in weights if each is not None]
        if not given and slot not in self._written:
            return False
        self.reserve(max((each.rank for each in given), default=1))
        assert self.a is not None
        columns = [
            mx.zeros((*self._shape_a(site), self.rank), self.dtype)
            if each is None
            else _pad(each.a.astype(self.dtype), -1, self.rank)
            for site, each in zip(self.sites, weights, strict=True)
        ]
        self.a[slot] = mx.concatenate(columns, axis=-1) if len(columns) > 1 else columns[0]
        for index, each in enumerate(weights):
            zero = mx.zeros((), self.dtype)
            self.bs[index][slot] = zero if each is None else _pad(each.b.astype(self.dtype), -2, self.rank)
            self._write_gain(index, slot, None if each is None else each.gain)
        self._written = self._written | {slot} if given else self._written - {slot}
        return True

    def read(self, slot: int) -> list[SiteWeights]:
        """Weights of a slot as `write` put them there, one entry per site."""
        assert self.a is not None
        columns = mx.split(self.a[slot], len(self.sites), axis=-1)
        return [
            SiteWeights(a, b[slot], None if gains is None else gains[slot])
            for a, b, gains in zip(columns, self.bs, self.gains, strict=True)
        ]

    @property
    def written(self) -> frozenset[int]:
        return frozenset(self._written)

    def arrays(self) -> list[mx.array]:
        """Everything that a write may have changed."""
        return [each for each in (self.a, *self.bs, *self.gains) if each is not None]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.arrays())

    def _write_gain(self, index: int, slot: int, gain: mx.array | None) -> None:
        gains = self.gains[index]
        if gains is None:
            if gain is None:
                return
            self.rows.found.clear()
            gains = self.gains[index] = mx.ones((self.slots, gain.shape[0]), mx.float32)
        gains[slot] = mx.ones((), mx.float32) if gain is None else gain

    def _shape_a(self, site: Site) -> tuple[int, ...]:
        return (site.experts, site.held_inputs) if site.kind == "switch" else (site.held_inputs,)

    def _shape_b(self, site: Site, rank: int) -> tuple[int, ...]:
        return (site.experts, rank, site.held_outputs) if site.kind == "switch" else (rank, site.held_outputs)


class LinearGroup(Stack):
    """Linears that read the same input."""

    def __init__(self, sites: Sequence[Site], rows: RowSlots, slots: int, dtype: mx.Dtype) -> None:
        super().__init__(sites, rows, slots, dtype)
        self._linears = [site.module for site in sites]
        self._deltas: dict[tuple[Kernel, bool], Deltas] = {}
        self._groups = tuple(map(group_of, self._linears))
        self._biased = tuple("bias" in each for each in self._linears)
        self._biases = tuple(each.bias for each in self._linears if "bias" in each)
        self._x: mx.array | None = None
        self._ys: list[mx.array | None] = []  # outputs for x that other members will ask for
        self._left = 0
        widths = [width for site in sites for width in (site.held_inputs, site.held_outputs)]
        self._fits_fused = all(width % 8 == 0 for width in widths)
        self._joined = joined_of(self._linears)

    def output(self, index: int, x: mx.array) -> mx.array:
        """Member `index`'s output for x [B, L, in] or [B*L, in]."""
        ys = self._ys
        if x is not self._x or (y := ys[index]) is None:
            ys = self._ys = list(self._outputs(x))
            y = ys[index]
            assert y is not None
            self._x, self._left = x, len(ys)
        ys[index] = None
        self._left -= 1
        if self._left == 0:
            self._x = None
        return y

    def write(self, slot: int, weights: Sequence[SiteWeights | None]) -> bool:
        self._deltas.clear()  # gains may have come
        return super().write(slot, weights)

    def _outputs(self, x: mx.array) -> list[mx.array]:
        slots_B = self.rows.slots_B
        assert slots_B is not None, "rows that use adapters"
        ys = [partial_sums(linear, x) for linear in self._linears]
        return self.deltas.added(self.held(), slots_B, x, ys)

    @property
    def deltas(self) -> Deltas:
        """How the outputs (`partial_sums`) of the linears change in the forward that is being built."""
        key = self.rows.kernel, self.rows.dora
        if key not in self._deltas:
            gained = tuple(self.rows.dora and gains is not None for gains in self.gains)
            self._deltas[key] = Deltas(
                self.rows.kernel, self.dtype, self._fits_fused, self._groups, self._biased, gained, *self._joined
            )
        return self._deltas[key]

    def held(self) -> Held:
        """Arrays that `deltas` computes with."""
        assert self.a is not None, "it has been written"
        gains = tuple(each for each, is_there in zip(self.gains, self.deltas.gained, strict=True) if is_there)
        return self.a, tuple(self.bs), tuple(each for each in gains if each is not None), self._biases


def _times(x_BLI: mx.array, w_SIO: mx.array, slots_B: mx.array) -> mx.array:
    """x W[slot], where copies of W per row would be too large to be made on a GPU."""
    if w_SIO.dtype != mx.float32 and on_cpu():
        return x_BLI @ w_SIO[slots_B]
    return times_of_slots(x_BLI, w_SIO, slots_B)


class MultiLoRALinear(nn.Module):  # type: ignore[misc]
    """Member of a group, in the place of its linear."""

    def __init__(self, linear: Any, group: LinearGroup, index: int) -> None:
        super().__init__()
        self.linear = linear
        self._plain = linear.__call__
        self.member = group, index
        self._rows = group.rows

    @property
    def bare(self) -> Any:
        return self.linear

    def __call__(self, x: mx.array) -> mx.array:
        """y for x [B, L, in]."""
        if self._rows.slots_B is None:
            y: mx.array = self._plain(x)
            return y
        group, index = self.member
        return group.output(index, x)


class MultiLoRAEmbedding(nn.Module):  # type: ignore[misc]
    """An embedding with adapters, also as the output layer that shares its weights (mlx-lm's LoRAEmbedding)."""

    def __init__(self, embedding: Any, stack: Stack) -> None:
        super().__init__()
        self.embedding = embedding
        self._stack = stack

    @property
    def bare(self) -> Any:
        return self.embedding

    def __call__(self, ids_BL: mx.array) -> mx.array:
        """Embeddings [B, L, dims] of the ids [B, L]."""
        y_BLD: mx.array = self.embedding(ids_BL)
        stack, slots_B = self._stack, self._stack.rows.slots_B
        if slots_B is None or stack.a is None:
            return y_BLD
        h_BLR = stack.a[slots_B[:, None], ids_BL]
        y_BLD = y_BLD + _times(h_BLR, stack.bs[0], slots_B).astype(y_BLD.dtype)
        gains_SV = stack.gains[0] if stack.rows.dora else None
        if gains_SV is None:
            return y_BLD
        return y_BLD * gains_SV[slots_B[:, None], ids_BL][..., None].astype(y_BLD.dtype)

    def as_linear(self, x_BLD: mx.array) -> mx.array:
        """Logits [B, L, ids] of hidden states."""
        y_BLV: mx.array = self.embedding.as_linear(x_BLD)
        stack, slots_B = self._stack, self._stack.rows.slots_B
        if slots_B is None or stack.a is None:
            return y_BLV
        h_BLR = _times(x_BLD.astype(stack.dtype), stack.bs[0].swapaxes(-1, -2), slots_B)
        delta_BLV = _times(h_BLR, stack.a.swapaxes(-1, -2), slots_B)
        y_BLV = y_BLV + delta_BLV.astype(y_BLV.dtype)
        gains_SV = stack.gains[0] if stack.rows.dora else None
        return y_BLV if gains_SV is None else y_BLV * gains_SV[slots_B][:, None, :].astype(y_BLV.dtype)


class MultiLoRASwitch(nn.Module):  # type: ignore[misc]
    """Experts' linears with adapters (mlx-lm's LoRASwitchLinear): one A, B per slot and expert."""

    def __init__(self, linear: Any, stack: Stack, routing: Routing) -> None:
        super().__init__()
        self.linear = linear
        self._stack = stack
        self._routing = routing

    @property
    def bare(self) -> Any:
        return self.linear

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """y [..., 1, out] for x [..., 1, in] and the expert of each token."""
        y: mx.array = self.linear(x, indices, sorted_indices=sorted_indices)
        stack, slots_B = self._stack, self._stack.rows.slots_B
        if slots_B is None or stack.a is None:
            return y
        at = self._slots(slots_B, indices, sorted_indices) * stack.a.shape[1] + indices.astype(mx.uint32)
        h = mx.gather_mm(x.astype(stack.dtype), stack.a.flatten(0, 1), rhs_indices=at)
        return y + mx.gather_mm(h, stack.bs[0].flatten(0, 1), rhs_indices=at).astype(y.dtype)

    def _slots(self, slots_B: mx.array, indices: mx.array, sorted_indices: bool) -> mx.array:
        """The slot of each token, in the shape of `indices`."""
        chosen = self._routing.indices
        assert chosen is not None, "the mixture's experts were called from outside it"
        per_row = chosen.size // slots_B.shape[0]
        if not sorted_indices:
            return mx.repeat(slots_B, per_row).reshape(indices.shape)
        order = mx.argsort(chosen.flatten())  # as switch_layers._gather_sort does
        return slots_B[order // per_row]


def _pad(array: mx.array, axis: int, size: int) -> mx.array:
    """Padded with zeros at the end, up to `size`."""
    missing = size - array.shape[axis]
    if missing == 0:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, missing)
    return mx.pad(array, widths)


def _widen(a: mx.array, members: int, old: int, new: int) -> mx.array:
    """A [..., J*old] as [..., J*new]."""
    parts = a.reshape(*a.shape[:-1], members, old)
    return _pad(parts, -1, new).reshape(*a.shape[:-1], members * new)
