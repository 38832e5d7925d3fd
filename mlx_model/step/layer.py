"""A layer of Llama, Qwen2 or Qwen3 in a decode step (`decode_step.py`), apart from its arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from mlx_model.joined import JoinedLinears, arrays_of
from mlx_model.kv.quantised import Packing
from mlx_model.step.adapting import Adapting
from mlx_model.step.cuda.products import whole
from mlx_model.step.cuda.rotary import Rotary
from mlx_model.step.product import Arrays, Padding, Product, added_and_normed

Rows = tuple[mx.array, ...]
"""Positions [B] that each row has read; where its KV is written in place, also those before its first one, and what
`attention_in_place` has of beginnings."""


@dataclass(frozen=True)
class Layer:
    """Everything that describes a layer but its arrays; layers that compare equal share compiled functions."""

    heads: tuple[int, int, int]  # of q, k, v on this rank
    inputs: tuple[Product, ...]  # of q, k and v; one, where they are joined
    output: Product
    gate_up: tuple[Product, ...]
    down: Product
    eps: tuple[float, ...]  # of the norms: after attention, after the layer, of q and k
    rope: Any = field(compare=False)  # the same in all layers
    rotary: Rotary | None = field(compare=False)  # the same by a kernel, with the norms before it

    @property
    def may_place(self) -> bool:
        """True if a kernel can write keys and values in place."""
        return self.rotary is not None and len(self.inputs) == 1

    def before(
        self,
        arrays: Any,
        x_ND: mx.array,
        rows: Rows,
        kv: Arrays = (),
        adapt: Adapting | None = None,
        packing: Packing | None = None,
    ) -> tuple[mx.array, ...]:
        """q, k, v [B, heads, L, size] of the rows' tokens, of what the layer was fed, after its norm.

        `kv`: its keys and values, in which these tokens' are written, packed if there is a `packing`; then q alone.
        """
        products, norms = arrays
        offset_B = rows[0]
        ys = _outputs("inputs", self.inputs, products, x_ND, self.heads, _if_changed(adapt, "inputs"))
        if kv:
            assert self.rotary is not None, "may_place"
            whole = ys[0] if len(ys) == 1 else mx.concatenate(ys, axis=-1)
            whole = whole.astype(kv[0].dtype if packing is None else packing.dtype)
            return (self.rotary.placed(whole, self.heads, norms[1:], self.eps[-1], rows[:2], kv, packing),)
        if len(ys) == 1:
            return self._taken_apart(norms, ys[0], offset_B)
        q, k, v = (_by_heads(y, offset_B.shape[0], heads) for y, heads in zip(ys, self.heads, strict=True))
        if norms:
            q, k = (mx.fast.rms_norm(each, norm, self.eps[2]) for each, norm in zip((q, k), norms[-2:], strict=True))
        return self.rope(q, offset=offset_B), self.rope(k, offset=offset_B), v

    def _taken_apart(self, norms: Arrays, ys: mx.array, offset_B: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """q, k, v of [N, all heads * size]: q and k have their norm and their positions together.

        The norm is that of all heads as they lie, since a part of them would be copied first. It rounds before it is
        weighted, so weighting it by itself gives the same numbers.
        """
        if self.rotary is not None and self.rotary.takes(ys, norms, offset_B):
            return self.rotary(ys, self.heads, norms[1:], self.eps[-1], offset_B)
        qkv = _by_heads(ys, offset_B.shape[0], sum(self.heads))
        of_q, of_k, _ = self.heads
        qk = qkv[:, : of_q + of_k]
        if norms:
            qk = mx.fast.rms_norm(qkv, None, self.eps[2])[:, : of_q + of_k] * norms[0]
        q, k = mx.split(self.rope(qk, offset=offset_B), [of_q], axis=1)
        return q, k, qkv[:, of_q + of_k :]

    def behind(
        self, arrays: Any, h_ND: mx.array, attended: mx.array, adapt: Adapting | None = None
    ) -> tuple[mx.array, mx.array]:
        """The layer's output [N, D] and its norm, of what it was fed and what attention makes.

        That is [B, heads, L, size], or [N, heads * size] where a kernel reads KV in place.
        """
        output, norm, gate_up, down, norm_behind = arrays
        if attended.ndim == 4 and attended.shape[2] > 1:
            attended = attended.swapaxes(1, 2)
        h_ND, x_ND = self._added("output", self.output, output, attended.reshape(h_ND.shape[0], -1), h_ND, adapt, norm)
        x_NI = self._gated(gate_up, x_ND, _if_changed(adapt, "gate_up"))
        return self._added("down", self.down, down, x_NI, h_ND, adapt, norm_behind)

    def _gated(self, arrays: Sequence[Arrays], x_ND: mx.array, adapt: Adapting | None) -> mx.array:
        if len(self.gate_up) == 1:
            product = self.gate_up[0]
            if adapt is None:
                return product.gated(arrays[0], x_ND)
            if (gated := adapt.gated("gate_up", x_ND, product.parts(arrays[0], x_ND))) is not None:
                return gated
        ys = _outputs("gate_up", self.gate_up, arrays, x_ND, (1, 1), adapt)
        y_NI: mx.array = swiglu(*(ys if len(ys) == 2 else mx.split(ys[0], 2, axis=-1)))
        return y_NI

    def _added(
        self,
        which: str,
        product: Product,
        arrays: Arrays,
        x_NI: mx.array,
        h_ND: mx.array,
        adapt: Adapting | None,
        norm: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """h and what a linear, with adapters, makes of x; and the norm of that."""
        eps, own = self.eps[which == "down"], _if_changed(adapt, which)
        if own is None:
            return product.added(arrays, x_NI, h_ND, norm, eps)
        y_ND = product.parts(arrays, x_NI)
        if (both := own.added_and_normed(which, x_NI, y_ND, h_ND, norm, eps)) is not None:
            return both
        y_ND = whole(y_ND, x_NI.dtype)
        if not own.ends_with_sum(which):
            return added_and_normed(own(which, x_NI, [y_ND])[0], h_ND, norm, eps)
        y_ND = own.part(which, x_NI, y_ND)
        return product.added_and_normed(arrays, y_ND, h_ND, norm, eps)


def _by_heads(y_NO: mx.array, rows: int, heads: int) -> mx.array:
    """Reshape to [B, heads, L, size]."""
    if y_NO.shape[0] == rows:
        return y_NO.reshape(rows, heads, 1, -1)
    return y_NO.reshape(rows, y_NO.shape[0] // rows, heads, -1).swapaxes(1, 2)


def _if_changed(adapt: Adapting | None, which: str) -> Adapting | None:
    return adapt if adapt is not None and adapt.changes(which) else None


def _outputs(
    which: str,
    products: Sequence[Product],
    arrays: Sequence[Arrays],
    x_NI: mx.array,
    widths: Sequence[int],
    adapt: Adapting | None,
) -> list[mx.array]:
    """Outputs of linears that read x; joined linears have one output unless adapters need them apart.

    `widths`: how theirs are to each other.
    """
    if adapt is None:
        return [product(each, x_NI) for product, each in zip(products, arrays, strict=True)]
    ys = [product.parts(each, x_NI) for product, each in zip(products, arrays, strict=True)]
    is_one = len(ys) < len(widths)
    if is_one and (added := adapt.joined(which, x_NI, ys[0])) is not None:
        return [added]
    ys = [whole(y, x_NI.dtype) for y in ys]
    if is_one:
        ends = list(accumulate(width * ys[0].shape[-1] // sum(widths) for width in widths))
        ys = list(mx.split(ys[0], ends[:-1], axis=-1))
    return adapt(which, x_NI, ys)


def layer_of(layer: Any, norm_behind: Any, padding: Padding = ()) -> tuple[Layer, Any, Any]:
    """A layer's description, and its arrays before and after attention. `norm_behind`: the norm that follows it."""
    attention, mlp = layer.self_attn, layer.mlp
    inputs, of_inputs = _products([attention.q_proj, attention.k_proj, attention.v_proj], padding)
    gate_up, of_gate_up = _products([mlp.gate_proj, mlp.up_proj], padding)
    output, of_output = Product.of(bare(attention.o_proj), padding)
    down, of_down = Product.of(bare(mlp.down_proj), padding)
    norms = [attention.q_norm, attention.k_norm] if "q_norm" in attention else []
    norm = layer.post_attention_layernorm
    heads = (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads)
    eps = tuple(each.eps for each in (norm, norm_behind, *norms[:1]))
    size = bare(attention.q_proj)["weight"].shape[0] // attention.n_heads
    how = Layer(heads, inputs, output, gate_up, down, eps, attention.rope, Rotary.of(attention.rope, size))
    weights = tuple(each.weight for each in norms)
    if norms and len(inputs) == 1:
        weights = (_of_heads(weights, heads), *weights)
    mx.eval([attention.rope[name] for name in arrays_of(attention.rope)])
    return how, (of_inputs, weights), (of_output, norm.weight, of_gate_up, of_down, norm_behind.weight)


def _of_heads(weights: Arrays, heads: Sequence[int]) -> mx.array:
    """Weights [size] of the norms of q and k, for each of their heads [q and k heads, 1, size]."""
    parts = [mx.broadcast_to(each, (count, 1, each.size)) for each, count in zip(weights, heads, strict=False)]
    whole = mx.concatenate(parts)
    mx.eval(whole)
    return whole


def _products(parts: Sequence[Any], padding: Padding) -> tuple[tuple[Product, ...], tuple[Arrays, ...]]:
    """Products of linears that read the same input."""
    own = [bare(part) for part in parts]
    joined: JoinedLinears | None = getattr(own[0], "joined", None)
    whole = own if joined is None else [joined.product]
    hows, arrays = zip(*(Product.of(each, padding) for each in whole), strict=True)
    return hows, arrays


def bare(module: Any) -> Any:
    """The model's own linear, which our adapters may have been put around."""
    return getattr(module, "bare", module)


def called(linear: Any, padding: Padding = ()) -> Callable[[mx.array], mx.array]:
    """A function that computes the linear."""
    how, arrays = Product.of(linear, padding)
    return lambda x_NI: how(arrays, x_NI)
