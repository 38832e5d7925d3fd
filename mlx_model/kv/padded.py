"""Attention in shapes of which MLX's fused kernels compute gradients on CUDA.

There the backward pass is fused for multiples of 128 queries only; for others MLX computes all scores anew by plain
operations, which takes as long as a layer's products, and so much memory that microbatches stay small. Booleans as a
mask are made numbers for each head and layer anew. So attention gets an object in place of keys (`PaddedRead`), which
fills the queries up and makes the numbers once for all heads and layers.

Positions are filled up, too: of 64 more than a multiple of 128, cuDNN's backward pass reads the missing half of the
last tile as scores of 0, and where all scores of a query are below some -88, as in real models, its gradient is not
finite (https://github.com/pytorch/pytorch/issues/196678).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_model.device import on_cuda

TILE = 128  # multiples of so many queries have a fused backward pass, and of so many positions a right one
_LARGEST_HEAD = 128
_CLOSE = 0.03  # of the largest number: how far gradients may be off in bfloat16


class Masks:
    """Masks of one forward pass as numbers; all layers ask for the same ones."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, mx.Dtype], tuple[mx.array, mx.array]] = {}

    def numbers(self, mask: mx.array, dtype: mx.Dtype) -> mx.array:
        """Numbers to add to scores: 0 where `mask` [..., L, positions] is true, filled up to whole tiles.

        Queries after it see all of its positions, and no query sees those after them.
        """
        key = id(mask), dtype
        if key not in self._made:
            added, batch = mx.where(mask, 0.0, -mx.inf).astype(dtype), [(0, 0)] * (mask.ndim - 2)
            queries, positions = mask.shape[-2:]
            added = mx.pad(added, [*batch, (0, -queries % TILE), (0, 0)])
            added = mx.pad(added, [*batch, (0, 0), (0, -positions % TILE)], constant_values=-mx.inf)
            self._made[key] = mask, added
        return self._made[key][1]


@dataclass(frozen=True, eq=False)
class PaddedRead:
    """The object that attention gets in place of keys."""

    keys: mx.array
    values: mx.array
    masks: Masks

    def attended(
        self, fused: Callable[..., mx.array], queries: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        """Output of MLX's attention `fused`, [B, heads, L, D]."""
        (count, size), keys, values = queries.shape[2:], self.keys, self.values
        if isinstance(mask, mx.array) and mask.dtype == mx.bool_ and size <= _LARGEST_HEAD and sinks is None:
            mask = self.masks.numbers(mask, queries.dtype)
            queries, keys, values = map(_in_tiles, (queries, keys, values))
        return fused(queries, keys, values, scale=scale, mask=mask, sinks=sinks)[:, :, :count]


@dataclass(frozen=True, eq=False)
class PartsRead:
    """The same for sequences of several shapes, which lie in one array: each of these parts has a read and a mask."""

    reads: Sequence[PaddedRead]
    seen: Sequence[mx.array]
    apart: Callable[[mx.array], Sequence[mx.array]]  # an array as those of its parts
    joined: Callable[[Sequence[mx.array]], mx.array]

    def attended(
        self, fused: Callable[..., mx.array], queries: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        """Output of MLX's attention `fused`, in the shape of the queries; NotImplementedError for another mask."""
        if mask is not None:
            raise NotImplementedError("the parts have masks of their own")
        parts = zip(self.reads, self.apart(queries), self.seen, strict=True)
        return self.joined([read.attended(fused, part, scale, seen, sinks) for read, part, seen in parts])


def _in_tiles(array: mx.array) -> mx.array:
    """[B, heads, L, D] with L filled up to whole tiles."""
    more = -array.shape[2] % TILE
    return mx.pad(array, [(0, 0), (0, 0), (0, more), (0, 0)]) if more else array


@cache
def is_right() -> bool:
    """True if this GPU's gradients in such shapes agree with those of plain operations, by a trial; False elsewhere."""
    if not on_cuda():
        return False
    try:
        return _gradients_agree(mx.fast.scaled_dot_product_attention)
    except Exception:  # a release of MLX or cuDNN that does not take such masks
        return False


def _gradients_agree(fused: Callable[..., mx.array]) -> bool:
    rows, heads, kv_heads, count, positions, size = 2, 4, 2, 100, 192, 64
    scale = size**-0.5
    shapes = [(rows, heads, count, size), *[(rows, kv_heads, positions, size)] * 2]
    inputs = [mx.random.normal(of, mx.bfloat16, key=mx.random.key(at)) for at, of in enumerate(shapes)]
    first = mx.array([0, 7])[:, None, None, None]
    seen = mx.arange(positions)
    mask = (seen <= mx.arange(positions - count, positions)[:, None]) & (seen >= first)

    def by_kernel(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        output = PaddedRead(keys, values, Masks()).attended(fused, queries, scale, mask, None)
        return mx.square(output.astype(mx.float32)).sum()

    def plainly(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        keys, values = (mx.repeat(each, heads // kv_heads, axis=1) for each in (keys, values))
        scores = mx.where(mask, (queries * scale) @ keys.swapaxes(-1, -2), -mx.inf)
        return mx.square(mx.softmax(scores, axis=-1) @ values).sum()

    low = [inputs[0] - 5, inputs[1] + 5, inputs[2]]  # scores near -200
    if not all(mx.all(mx.isfinite(each)).item() for each in mx.grad(by_kernel, argnums=(0, 1, 2))(*low)):
        return False
    found = mx.grad(by_kernel, argnums=(0, 1, 2))(*inputs)
    wanted = mx.grad(plainly, argnums=(0, 1, 2))(*(each.astype(mx.float32) for each in inputs))
    return all(
        bool((mx.max(mx.abs(one.astype(mx.float32) - other)) <= _CLOSE * mx.max(mx.abs(other))).item())
        for one, other in zip(found, wanted, strict=True)
    )
