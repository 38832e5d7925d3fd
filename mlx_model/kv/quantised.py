"""KV in 8 or 4 bits: mlx-lm's caches of one row and of a batch, which hold each position packed.

mlx-lm has such a cache for one row alone, of three arrays for keys and three for values. Here one array holds all that
belongs to a position: the codes, then each group's scale and bias. So whatever moves, cuts, pads or stores plain KV
does the same with packed KV and need not know of its parts.

A position is quantised when it is written, and always read back as written: what a row attends to does not depend on
how its prompt was cut into pieces, nor on whether it was found in the prefix cache. It is read in one of two ways:

- unpacked to the model's dtype, one layer at a time, by elementwise operations, which take views of any strides. The
  model sees plain keys and values, so this serves every kind of attention;
- as it is packed, in decode steps: from codes, scales and biases mlx-lm's quantised attention computes on a CPU, from
  whole positions `cuda/` on CUDA and `metal/` on a Mac (`Packing.read`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_model.cuda import fused
from mlx_model.device import on_metal
from mlx_model.kv.cuda import attention as cuda_attention
from mlx_model.kv.metal import attention as metal_attention

# Milliseconds of a decode step's attention in one layer of 8 rows, 2,048 positions and 8 heads of 128, fp32 on 2 cores:
# 70 plain, 310 unpacked and 200 quantised at 8 bits, 270 and 60 at 4. Of wider pieces quantised attention is 5 to 8
# times slower than unpacking, which costs them next to nothing. Not on Metal, where `quantized_matmul` without
# transposing, which reads values, was wrong for some shapes; CUDA has none for these (docs/internals/kv.md).
Read = Literal["unpacked", "parts", "packed"]


@dataclass(frozen=True)
class Packing:
    """How one layer's keys and values are packed: `bits` a number, with a scale and a bias for each group."""

    bits: int
    group_size: int
    dtype: mx.Dtype
    read: Read = "unpacked"  # by decode steps

    def words(self, dim: int) -> int:
        """Number of 32-bit words of one position: codes, scales and biases."""
        return dim * self.bits // 32 + 2 * (dim // self.group_size) * self.dtype.size // 4

    def size(self, words: int) -> int:
        """Number of numbers of one position that has so many words."""
        return words * self.group_size // self.words(self.group_size)

    def pack(self, array: mx.array) -> mx.array:
        """[..., dim] of numbers as [..., words] of uint32."""
        codes, scales, biases = mx.quantize(
            mx.contiguous(array.astype(self.dtype)), group_size=self.group_size, bits=self.bits
        )
        return mx.concatenate([codes, mx.view(mx.concatenate([scales, biases], axis=-1), mx.uint32)], axis=-1)

    def parts(self, packed: mx.array, dim: int) -> tuple[mx.array, mx.array, mx.array]:
        """Codes, scales and biases, as `mx.quantize` gives them; views."""
        words, groups = dim * self.bits // 32, dim // self.group_size
        both = mx.view(packed[..., words:], self.dtype)
        return packed[..., :words], both[..., :groups], both[..., groups:]

    def unpack(self, packed: mx.array, dim: int) -> mx.array:
        """[..., dim] of numbers again."""
        codes, scales, biases = self.parts(packed, dim)
        groups = scales.shape[-1]
        numbers = mx.view(codes, mx.uint8)
        if self.bits == 8:
            grouped = _scaled(mx.unflatten(numbers, -1, (groups, -1)), scales[..., None], biases[..., None])
            return mx.flatten(grouped, -2)
        pairs = mx.unflatten(numbers, -1, (groups, -1, 1))
        return mx.flatten(_scaled_pairs(pairs, scales[..., None, None], biases[..., None, None]), -3)


@fused
def _scaled(codes: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    return codes.astype(scales.dtype) * scales + biases


@fused
def _scaled_pairs(codes: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """Dequantise two codes per byte, the lower one first."""
    return ((codes >> mx.array([0, 4], mx.uint8)) & 15).astype(scales.dtype) * scales + biases


def install_kernels() -> None:
    """Put the GPU's kernels before mlx-lm's quantised attention, in this process."""

    def attention(
        queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, group_size: int, bits: int
    ) -> mx.array:
        if on_metal():
            if metal_attention.is_for(queries, keys, values, mask):
                return metal_attention.attention(queries, keys, values, scale, mask, bits, group_size)
        elif cuda_attention.is_for(queries, keys, values, mask, bits):
            return cuda_attention.attention(queries, keys, values, scale, mask, bits=bits, group_size=group_size)
        packing, size = Packing(bits, group_size, queries.dtype), queries.shape[-1]
        readable = (packing.unpack(array, size) for array in (keys, values))
        return mx.fast.scaled_dot_product_attention(queries, *readable, scale=scale, mask=mask)

    base.quantized_scaled_dot_product_attention = attention


class _Kernels(Protocol):
    def packs(self, keys: mx.array, values: mx.array) -> bool:
        """True if the kernel supports the keys and values that a decode step adds."""

    def pack(
        self, keys: mx.array, values: mx.array, bits: int, group_size: int, words: int
    ) -> tuple[mx.array, mx.array]:
        """Both packed, in one operation."""


def _kernels() -> _Kernels:
    return metal_attention if on_metal() else cuda_attention


class _Quantised:
    """Adds packing to mlx-lm's caches: `keys` and `values` are stored packed, and `update_and_fetch` unpacks them."""

    packing: Packing
    _is_decoding = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write these positions; all positions, as the model's attention reads them."""
        packing, dims = self.packing, (keys.shape[-1], values.shape[-1])
        packed = super().update_and_fetch(*self._packed(keys, values))  # type: ignore[misc]
        at_most = {"unpacked": 0, "parts": 1, "packed": cuda_attention.MOST_QUERIES}[packing.read]
        self._is_decoding = keys.shape[2] <= at_most
        if self._is_decoding and packing.read == "packed":
            return packed  # type: ignore[no-any-return]
        read = packing.parts if self._is_decoding else packing.unpack
        readable = [read(array, dim) for array, dim in zip(packed, dims, strict=True)]
        return readable[0], readable[1]

    def _packed(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        packing, kernels = self.packing, _kernels()
        if packing.read == "packed" and keys.shape[2] == 1 and kernels.packs(keys, values):
            keys, values = keys.astype(packing.dtype), values.astype(packing.dtype)
            return kernels.pack(keys, values, packing.bits, packing.group_size, packing.words(keys.shape[3]))
        return packing.pack(keys), packing.pack(values)

    @property
    def bits(self) -> int:
        """mlx-lm's attention is the quantised one where its cache has this attribute."""
        if not self._is_decoding:
            raise AttributeError("read unpacked")
        return self.packing.bits

    @property
    def group_size(self) -> int:
        """Read by mlx-lm together with `bits`."""
        return self.packing.group_size


class QuantisedKVCache(_Quantised, KVCache):  # type: ignore[misc]
    """Packed KV of one row."""

    def __init__(self, packing: Packing) -> None:
        super().__init__()
        self.packing = packing

    @classmethod
    def merge(cls, caches: list[QuantisedKVCache]) -> BatchQuantisedKVCache:
        """A batch of these rows."""
        batch = BatchQuantisedKVCache(caches[0].packing, [0] * len(caches))
        batch.state = BatchKVCache.merge(caches).state
        return batch


class BatchQuantisedKVCache(_Quantised, BatchKVCache):  # type: ignore[misc]
    """Packed KV of several rows, padded on the left."""

    def __init__(self, packing: Packing, left_padding: list[int]) -> None:
        super().__init__(left_padding)
        self.packing = packing
