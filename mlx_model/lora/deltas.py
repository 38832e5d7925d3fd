"""Deltas that adapters add to linears that read one input, as a function of arrays: like layers share it, compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import mlx.core as mx

from mlx_model.collectives.cuda.sums import all_sum
from mlx_model.lora.kernels import (
    LARGEST_RANK,
    are_gate_and_up,
    gates,
    may_end,
    norms,
    one_pass,
    one_pass_gated,
    one_pass_joined,
    one_pass_normed,
)
from mlx_model.step.cuda.products import whole

Kernel = Literal["gather", "take", "fused"]
"""How deltas are computed: `gather` two gathered matmuls, `take` copies of the rows' weights and plain matmuls, `fused`
one operation for all members (CUDA and Metal, few tokens per row; `take` for more)."""

Held = tuple[mx.array, tuple[mx.array, ...], tuple[mx.array, ...], tuple[mx.array, ...]]
"""A [S, in, J*R] and each B [S, R, out]; gains [S, out] and biases [out] of the members that have them."""


# Inner products, where rows have several tokens: the kernel reads A anew for each token, plain operations do not.
_FEW = 2048


@dataclass(frozen=True)
class Deltas:
    """How the outputs of J members are changed, without the arrays."""

    kernel: Kernel
    dtype: mx.Dtype  # of A and B
    fits_fused: bool  # widths are multiples of 8
    groups: tuple[Any, ...]  # of the ranks that each member's outputs are summed over, or None
    biased: tuple[bool, ...]
    gained: tuple[bool, ...]  # by DoRA, in this forward
    widths: tuple[int, ...] = ()  # of the linears that the members are joined with, if they are
    places: tuple[int, ...] = ()  # the members' among them

    @property
    def ends_with_sum(self) -> bool:
        """True if members' outputs are sums of `parts` over ranks, with the bias added after that."""
        return not any(self.gained)

    def added(self, held: Held, slots_B: mx.array, x: mx.array, ys: list[mx.array]) -> list[mx.array]:
        """All members' outputs, of what each makes of x [B, L, in], [B*L, in] or [B, in] by itself (`partial_sums`)."""
        _, _, gains, biases = held
        ys = self.parts(held, slots_B, x, ys)
        gain_of, bias_of = (_by_member(*each) for each in ((self.gained, gains), (self.biased, biases)))
        for at, group in enumerate(self.groups):
            if group is not None:
                ys[at] = all_sum(ys[at], group)
                ys[at] = ys[at] if (bias := bias_of[at]) is None else ys[at] + bias
            if (gains_SO := gain_of[at]) is not None:
                ys[at] = _gained(ys[at], gains_SO, bias_of[at], slots_B)
        return ys

    def parts(self, held: Held, slots_B: mx.array, x: mx.array, ys: list[mx.array]) -> list[mx.array]:
        """The same before sums over ranks, biases after these and gains."""
        a_SIJ, bs, _, _ = held
        if ys[0].dtype == self.dtype and self._fuses(a_SIJ, slots_B, x):
            return one_pass(x, a_SIJ, bs, ys, _of_each(slots_B, x, a_SIJ))
        x_BLI = x.reshape(slots_B.size, -1, a_SIJ.shape[1]).astype(self.dtype)
        deltas = deltas_of(x_BLI, a_SIJ, bs, slots_B, self.kernel)
        return [y + delta.astype(y.dtype).reshape(y.shape) for y, delta in zip(ys, deltas, strict=True)]

    def joined(self, held: Held, slots_B: mx.array, x: mx.array, y: mx.array) -> mx.array | None:
        """All outputs of the joined linears, of theirs [N, width] or its parts; None: no kernel is made for these."""
        a_SIJ, bs, _, _ = held
        if not self.widths or any(width % 8 for width in self.widths) or not self._ends(held, slots_B, x, y):
            return None
        y = y if y.ndim == 2 or may_end() else whole(y, self.dtype)
        return one_pass_joined(x, a_SIJ, bs, y, _of_each(slots_B, x, a_SIJ), self.widths, self.places)

    def gated(self, held: Held, slots_B: mx.array, x: mx.array, y: mx.array) -> mx.array | None:
        """SwiGLU of gate and up, [N, width], of their one product [N, 2 width] or its parts; None: as with `joined`."""
        a_SIJ, bs, _, _ = held
        are_both = are_gate_and_up(self.widths, self.places)
        if not are_both or not self._ends(held, slots_B, x, y) or not gates(self.widths[0], bs[0].shape[1]):
            return None
        return one_pass_gated(x, a_SIJ, bs, y, _of_each(slots_B, x, a_SIJ))

    def added_and_normed(
        self, held: Held, slots_B: mx.array, x: mx.array, y: mx.array, fed: mx.array, norm: mx.array, eps: float
    ) -> tuple[mx.array, mx.array] | None:
        """One member's output [N, out], of it or its parts, with what the layer was fed, and the norm of that; None: as
        with `joined`."""
        a_SIJ, bs, _, _ = held
        is_one = len(bs) == 1 and not self.widths and self.dtype == fed.dtype == norm.dtype
        if not is_one or not self._ends(held, slots_B, x, y) or not norms(y.shape[-1]):
            return None
        return one_pass_normed(x, a_SIJ, bs[0], y, _of_each(slots_B, x, a_SIJ), fed, norm, eps)

    def _ends(self, held: Held, slots_B: mx.array, x: mx.array, y: mx.array) -> bool:
        """True if a kernel adds deltas to y, and nothing but what follows in the layer has to be done then."""
        is_typed = y.dtype == (self.dtype if y.ndim == 2 else mx.float32)
        return is_typed and self.ends_with_sum and not any(self.groups) and self._fuses(held[0], slots_B, x)

    def _fuses(self, a_SIJ: mx.array, slots_B: mx.array, x: mx.array) -> bool:
        count = x.size // a_SIJ.shape[1]
        are_few = count == slots_B.size or count * a_SIJ.shape[2] <= _FEW
        fits = self.fits_fused and a_SIJ.shape[2] <= LARGEST_RANK * len(self.groups)
        return self.kernel == "fused" and are_few and fits and x.dtype == self.dtype


def _of_each(slots_B: mx.array, x: mx.array, a_SIJ: mx.array) -> mx.array:
    """The slots of all that x [rows, tokens, in], or its like in memory, holds."""
    tokens = x.size // (slots_B.size * a_SIJ.shape[1])
    return slots_B if tokens == 1 else mx.repeat(slots_B, tokens)


def _by_member(has: tuple[bool, ...], arrays: tuple[mx.array, ...]) -> list[mx.array | None]:
    left = iter(arrays)
    return [next(left) if each else None for each in has]


def _gained(y: mx.array, gains_SO: mx.array, bias: mx.array | None, slots_B: mx.array) -> mx.array:
    """DoRA: the sum without bias times the gain; rows of other kinds have gain 1."""
    gain_BO = gains_SO[slots_B].astype(y.dtype)
    y_BLO = y.reshape(slots_B.shape[0], -1, y.shape[-1]) * gain_BO[:, None, :]
    if bias is not None:
        y_BLO = y_BLO + bias * (1 - gain_BO[:, None, :])
    return y_BLO.reshape(y.shape)


def times_of_slots(x_BLI: mx.array, w_SIO: mx.array, slots_B: mx.array) -> mx.array:
    """x W[slot], [B, L, O]."""
    return mx.gather_mm(x_BLI, w_SIO, lhs_indices=_in_order(len(x_BLI)), rhs_indices=slots_B)


@cache
def _in_order(count: int) -> mx.array:
    """The rows' numbers [B], which MLX would make in an operation of their own for each product."""
    return mx.array(list(range(count)), mx.uint32)


def deltas_of(
    x_BLI: mx.array, a_SIJ: mx.array, bs: Sequence[mx.array], slots_B: mx.array, kernel: Kernel
) -> list[mx.array]:
    """x A[slot] B_j[slot], [B, L, out_j], of every member, by plain operations."""
    rank = bs[0].shape[1]
    if kernel == "gather":
        h_BLJ = times_of_slots(x_BLI, a_SIJ, slots_B)
        parts = mx.split(h_BLJ, len(bs), axis=-1) if len(bs) > 1 else [h_BLJ]
        return [times_of_slots(part, b, slots_B) for part, b in zip(parts, bs, strict=True)]
    h_BLJ = x_BLI @ a_SIJ[slots_B]
    return [h_BLJ[..., j * rank : (j + 1) * rank] @ b[slots_B] for j, b in enumerate(bs)]
