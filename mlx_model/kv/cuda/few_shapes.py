"""Attention of prompts on CUDA in few shapes: cuDNN, which computes it there, plans each new one for some 36 ms.

It does so in the thread that decodes, for each number of rows, queries and keys, and each layout. On one H100, of a
Qwen3 0.6B's shape in bfloat16, the first prompt of a length had its first token after 71 ms, and the next one after 18.
Here rows, queries and keys are made up to the next of a few sizes, and what comes of it is cut to what was asked for.
A trainer's passes have few shapes of their own, and nothing is done to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx

_DTYPES = (mx.bfloat16, mx.float16)
_LARGEST_HEAD = 128  # that cuDNN takes; larger ones go another way, which plans nothing
_SMALLEST, _DOUBLING_TO, _STEP, _STEPS = 16, 256, 128, 8
_applied: ContextVar[bool] = ContextVar("few_shapes", default=False)


@contextmanager
def applied() -> Iterator[None]:
    """Forward passes in here have few shapes, on CUDA."""
    before = _applied.set(True)
    try:
        yield
    finally:
        _applied.reset(before)


def size_for(count: int) -> int:
    """The next size of queries or keys: powers of two, then steps that waste less of a long prompt's time."""
    power = max(_SMALLEST, 1 << (count - 1).bit_length())
    if power <= _DOUBLING_TO:
        return power
    step = max(_STEP, power // _STEPS)
    return -(-count // step) * step


def rows_for(count: int) -> int:
    """The next number of rows: powers of two, and the middle between them."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def is_for(queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> bool:
    """True if the call is to be padded to a common shape: several queries, with a causal or a boolean mask."""
    is_drawn = isinstance(mask, mx.array) and mask.dtype == mx.bool_ and mask.shape[-1] == keys.shape[2]
    return (
        _applied.get()
        and (is_drawn or (isinstance(mask, str) and mask == "causal"))
        and 1 < queries.shape[2] <= keys.shape[2]
        and queries.dtype in _DTYPES
        and max(queries.shape[3], values.shape[3]) <= _LARGEST_HEAD
    )


def in_few_shapes(
    fused: Callable[..., mx.array], queries: mx.array, keys: mx.array, values: mx.array, mask: Any, **others: Any
) -> mx.array:
    """Attention of `fused` on padded inputs, [rows, heads, queries, size]; shapes as in MLX's attention.

    What is put after queries and rows sees zeros, lest a sum over nothing is not finite; it is not read.
    """
    rows, _, at_once, _ = queries.shape
    positions = keys.shape[2]
    more_rows, more = rows_for(rows) - rows, size_for(at_once) - at_once
    # A causal mask is drawn from the last query and the last key: as many are put after both.
    more_keys = more if isinstance(mask, str) else size_for(positions) - positions
    if not (more_rows or more or more_keys):
        return fused(queries, keys, values, mask=mask, **others)
    if not isinstance(mask, str):
        while mask.ndim < 4:
            mask = mask[None]
        behind = (0, more if mask.shape[2] > 1 else 0)
        mask = mx.pad(mask, [(0, 0), (0, 0), (0, 0), (0, more_keys)])
        mask = mx.pad(mask, [(0, more_rows if mask.shape[0] > 1 else 0), (0, 0), behind, (0, 0)], constant_values=True)
    keys, values = (mx.pad(each, [(0, more_rows), (0, 0), (0, more_keys), (0, 0)]) for each in (keys, values))
    queries = mx.pad(queries, [(0, more_rows), (0, 0), (0, more), (0, 0)])
    return fused(queries, keys, values, mask=mask, **others)[:rows, :, :at_once]
