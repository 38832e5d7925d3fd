"""How a linear computes in the forward of a decode step (`decode_step.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from mlx_model.collectives.cuda.sums import all_sum, near_sums
from mlx_model.joined import arrays_of
from mlx_model.sites import group_of, quantized_product
from mlx_model.step.cuda import products

Arrays = tuple[mx.array, ...]
Padding = tuple[tuple[int, int], ...]
"""Rows, and more rows of which a product takes less time: MLX multiplies few of them one by one."""


@dataclass(frozen=True)
class Product:
    """How a linear computes. Its arrays come with each call, so that all layers share what is compiled."""

    names: tuple[str, ...]  # of its arrays; "stored": the weight as [out, in], too, for a kernel of ours
    group: Any = None  # of the ranks that it sums over
    bits: int = 0  # 0: not quantised, and the weight comes as [in, out]
    group_size: int = 0
    mode: str = ""
    padding: Padding = ()

    @classmethod
    def of(cls, linear: Any, padding: Padding = ()) -> tuple[Product, Arrays]:
        """A linear as mlx-lm or MLX has it, plain, quantised or divided; `padding`: for quantised ones."""
        arrays = {name: linear[name] for name in arrays_of(linear)}
        group = group_of(linear)
        by_kernels = products.are_there()  # quantised ones have none, but for what lies after them
        if "scales" in arrays:
            how = cls(tuple(arrays), group, linear.bits, linear.group_size, linear.mode, padding)
        else:
            if by_kernels:
                products.are_many_there(arrays["weight"].dtype)
                arrays["stored"] = arrays["weight"]
            arrays["weight"] = arrays["weight"].T
            mx.eval(arrays["weight"])  # a view that no step makes again
            how = cls(tuple(arrays), group)
        return how, tuple(arrays.values())

    def __call__(self, arrays: Arrays, x_NI: mx.array) -> mx.array:
        """Outputs [N, out] for inputs [N, in]."""
        return self._summed(arrays, self.partial(arrays, x_NI))

    def _summed(self, arrays: Arrays, y_NO: mx.array) -> mx.array:
        if self.group is None:
            return y_NO
        y_NO = all_sum(y_NO, self.group)
        return y_NO + arrays[self.names.index("bias")] if "bias" in self.names else y_NO

    def partial(self, arrays: Arrays, x_NI: mx.array) -> mx.array:
        """The same without the sum over ranks and the bias after it."""
        by = dict(zip(self.names, arrays, strict=True))
        if self.bits:
            y_NO = quantized_product(padded(x_NI, self.padding), by, self)[: x_NI.shape[0]]
        elif "stored" in by and products.is_for(x_NI, by["stored"]):
            y_NO = products.product(x_NI, by["stored"])
        elif "bias" in by and self.group is None:
            return mx.addmm(by["bias"], x_NI, by["weight"])
        else:
            y_NO = x_NI @ by["weight"]
        return y_NO + by["bias"] if "bias" in by and self.group is None else y_NO

    def parts(self, arrays: Arrays, x_NI: mx.array) -> mx.array:
        """The same as `partial`, or, in float32, what has to be added up to it [parts, N, out]."""
        weight = self._stored(arrays, x_NI)
        return self.partial(arrays, x_NI) if weight is None else products.parts(x_NI, weight)

    def _stored(self, arrays: Arrays, x_NI: mx.array) -> mx.array | None:
        """The weight for a kernel of ours, if that makes all of the output."""
        if self.group is not None or "stored" not in self.names or "bias" in self.names:
            return None
        weight = arrays[self.names.index("stored")]
        return weight if products.is_for(x_NI, weight) else None

    def gated(self, arrays: Arrays, x_NI: mx.array) -> mx.array:
        """SwiGLU of the halves of what this makes of x, [N, out / 2]."""
        if (weight := self._stored(arrays, x_NI)) is not None:
            return products.gated(x_NI, weight)
        y_NI: mx.array = swiglu(*mx.split(self(arrays, x_NI), 2, axis=-1))
        return y_NI

    def added(
        self, arrays: Arrays, x_NI: mx.array, h_NO: mx.array, norm: mx.array, eps: float
    ) -> tuple[mx.array, mx.array]:
        """h and what this makes of x, and the norm of that: what lies between this linear and the next one."""
        weight = self._stored(arrays, x_NI)
        if weight is not None and x_NI.dtype == h_NO.dtype and products.adds_and_norms(h_NO, norm):
            return products.added_and_normed(products.parts(x_NI, weight), h_NO, norm, eps)
        return self.added_and_normed(arrays, self.partial(arrays, x_NI), h_NO, norm, eps)

    def added_and_normed(
        self, arrays: Arrays, y_NO: mx.array, h_NO: mx.array, norm: mx.array, eps: float
    ) -> tuple[mx.array, mx.array]:
        """The same of `partial` sums."""
        is_sum = self.group is not None and "bias" not in self.names
        if is_sum and (near := near_sums(self.group, y_NO, h_NO, norm)):
            return near.added_and_normed(y_NO, h_NO, norm, eps)
        return added_and_normed(self._summed(arrays, y_NO), h_NO, norm, eps)


def padded(x_NI: mx.array, padding: Padding) -> mx.array:
    """x with as many rows more as make its product faster."""
    rows = x_NI.shape[0]
    more = dict(padding).get(rows, rows) - rows
    return mx.pad(x_NI, [(0, more), (0, 0)]) if more else x_NI


def added_and_normed(y_NO: mx.array, h_NO: mx.array, norm: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """h and what a linear made, and the norm of that."""
    if y_NO.dtype == h_NO.dtype and products.adds_and_norms(h_NO, norm):
        return products.added_and_normed(y_NO, h_NO, norm, eps)
    h_NO = h_NO + y_NO
    return h_NO, mx.fast.rms_norm(h_NO, norm, eps)
