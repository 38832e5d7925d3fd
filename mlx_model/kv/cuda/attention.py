"""Attention of decode steps on CUDA: few queries a row over all that the row's KV holds, plain or packed.

MLX's fused attention there is made for prompts. With the mask that rows of different lengths need, 32 rows of 2,048
positions (32 heads of 128 over 8, bfloat16) cost it 0.59 ms a layer on an H200, where reading the KV once takes 0.06.
Packed KV (`kv/quantised.py`) would have to be unpacked in memory first. These kernels read KV once, as it is stored:

- `read.cu`: a block reads a stretch of one row's positions for up to four queries that share a KV head. A group of
  threads reads four positions at a time, or eight packed ones, eight numbers a thread (`eight.cuh`), and keeps a
  running maximum, sum and weighted values (online softmax: Milakov and Gimelshein, arXiv 1805.02867); in the end the
  block adds up its groups'.
- `tiles.cu`: the same for up to 16 queries that share a KV head, on tensor cores, for plain KV of 16 bits: with six
  queries a row `read.cu` is busy multiplying (`tensor_cores.cuh` is how it does that).
- `join.cu`: adds up a row's stretches (flash decoding: Dao et al., 2023), and the attention sink if the model has one.
- `pack.cu`: packs what a step adds where it is not written in place (`place.py`), in one operation in place of nine.

`install()` puts all but the last before `mx.fast.scaled_dot_product_attention`; `kv/quantised.py` puts them before
mlx-lm's quantised attention. What they are not made for goes on to MLX's own: many queries a row, additive masks, other
head sizes, few positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from math import e, log2
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mlx_model.cuda import is_on, kernel, number
from mlx_model.kv.cuda import few_shapes

_HERE = Path(__file__).parent
_LOG2_E = log2(e)  # the kernels' powers are of two
SWITCH = "PARALLM_CUDA_ATTENTION"  # 0: MLX's own
_HEAD_SIZES = (64, 128, 256)
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
_SHORTEST = 64  # positions
MOST_QUERIES = 8  # of a row: its last token and a draft of seven
_THREADS = 128  # of a block of `read.cu`
_BLOCKS = 1056  # eight for each of an H200's 132 multiprocessors
_STRETCH = 128  # positions that a block reads, at least
_TILED_SIZES = (64, 128)
_TILED_FROM = 5  # queries that share a KV head; below, `read.cu` waits for memory only
TILED_QUERIES = 16  # of a block of `tiles.cu`
_TILED_THREADS = 64
TILED_BLOCKS = 396
_JOIN_THREADS = 256
_PIECES = {"tiles": "tensor_cores.cuh", "pack": "pack.cuh"}


@cache  # by names, which compare faster than paths
def _kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], *, in_place: bool = False) -> Any:
    switches = ["#define IN_PLACE"] * in_place + ["#define BEGINNINGS"] * ("blocks" in inputs)
    pieces = (_PIECES.get(name, "eight.cuh"), *switches)
    return kernel(_HERE / f"{name}.cu", inputs, outputs, pieces, copies=False)


@cache
def _nothing() -> mx.array:
    nothing = mx.zeros((1, 1, 1, 1), mx.bool_)
    mx.eval(nothing)
    return nothing


def is_for(queries: mx.array, keys: mx.array, values: mx.array, mask: Any, bits: int = 0) -> bool:
    """True if the kernels support these arrays; shapes as in `attention`."""
    size = queries.shape[-1]
    return (
        queries.ndim == 4
        and (queries.shape[2] == 1 or (queries.shape[2] <= MOST_QUERIES and isinstance(mask, mx.array)))
        and size in _HEAD_SIZES
        and queries.dtype in _DTYPES
        and keys.shape == values.shape
        and keys.shape[2] >= _SHORTEST
        and (bits > 0 or (keys.shape[3] == size and keys.dtype == values.dtype == queries.dtype))
        and _is_plain(mask)
    )


def _is_plain(mask: Any) -> bool:
    """None (all is seen), "causal" (the same, for the last position's query), or booleans for each row and query."""
    if mask is None or isinstance(mask, str):
        return True
    return bool(mask.dtype == mx.bool_ and mask.ndim == 4 and mask.shape[1] == 1)


def _is_tiled(dtype: mx.Dtype, size: int, shared_by: int) -> bool:
    """True if `tiles.cu` computes `shared_by` queries that share a KV head."""
    return dtype in (mx.bfloat16, mx.float16) and size in _TILED_SIZES and shared_by >= _TILED_FROM


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
    bits: int = 0,
    group_size: int = 0,
) -> mx.array:
    """[rows, query heads, queries, size] for queries of that shape; keys and values [rows, KV heads, positions, size],
    or packed (`kv/quantised.py`) if there are `bits`."""
    rows, _, at_once, _ = queries.shape
    _, kv_heads, positions, _ = keys.shape
    masked = isinstance(mask, mx.array)
    seen = mx.broadcast_to(mask, (rows, 1, at_once, positions)) if masked else _nothing()
    read, join = _calls(
        queries.shape, kv_heads, positions, queries.dtype, scale, masked, sinks is not None, bits, group_size
    )
    part, about = read(inputs=[queries, keys, values, seen])
    (out,) = join(inputs=[part, about, about if sinks is None else sinks.astype(mx.float32)])
    return cast(mx.array, out)


def reads_in_place(size: int, dtype: mx.Dtype) -> bool:
    """True if `attention_in_place` supports this head size and dtype."""
    return is_on(SWITCH) and size in _HEAD_SIZES and dtype in _DTYPES


def reads_beginnings(size: int, dtype: mx.Dtype) -> bool:
    """True if it does so over beginnings that rows have in common, too."""
    return reads_in_place(size, dtype) and _is_tiled(dtype, size, TILED_QUERIES)


def attention_in_place(
    queries: mx.array,
    kv: Sequence[mx.array],
    scale: float,
    rows: Sequence[mx.array],
    bits: int = 0,
    group_size: int = 0,
    slots: int = 0,
) -> mx.array:
    """[rows * queries, query heads * size] of queries [rows, heads, queries, size], those of a row one after another.

    `kv`: keys and values, as `attention` has them. `rows` [B]: positions that each has read before the first of its
    queries, and those before the row's own first one. Where rows have beginnings in common, keys and values of these
    follow, and how many of each row's positions these are, which are not counted before its first one; then `Blocks`.
    """
    kv_heads, room = kv[0].shape[1:3]
    if slots:
        read, join = _calls_with_beginnings(queries.shape, kv_heads, queries.dtype, scale, rows[3].shape[0], slots)
    else:
        read, join = _calls(
            queries.shape, kv_heads, room, queries.dtype, scale, False, False, bits, group_size, in_place=True
        )
    part, about = read(inputs=[queries, *kv, *rows])
    (out,) = join(inputs=[part, about, about, queries])
    return cast(mx.array, out)


@lru_cache(2048)
def _calls(
    shape: tuple[int, int, int, int],
    kv_heads: int,
    positions: int,
    dtype: mx.Dtype,
    scale: float,
    masked: bool,
    sinks: bool,
    bits: int,
    group_size: int,
    *,
    in_place: bool = False,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Both kernels, but for their inputs. All layers of a step ask for the same, and a step waits for its host."""
    rows, query_heads, at_once, size = shape
    template = [("T", dtype), ("D", size), ("MASKED", masked), ("SCALE", number(scale * _LOG2_E))]
    shared_by = query_heads // kv_heads * at_once
    if not bits and _is_tiled(dtype, size, shared_by):
        name, threads, at_a_time, blocks = "tiles", _TILED_THREADS, TILED_QUERIES, TILED_BLOCKS
    else:
        at_a_time = 1 if shared_by == 1 else 2 if shared_by == 2 else 4
        name, threads, blocks = "read", _THREADS, _BLOCKS
        template += [("HEADS", at_a_time), ("BITS", bits), ("GROUP", group_size or size)]
    across = kv_heads * ((shared_by + at_a_time - 1) // at_a_time)
    stretches = 1
    while stretches * rows * across < blocks and stretches * 2 * _STRETCH <= positions:
        stretches *= 2
    seen = ("offset", "padding") if in_place else ("mask",)
    read = partial(
        _kernel(name, ("queries", "keys", "values", *seen), ("part", "about"), in_place=in_place),
        template=[*template, ("THREADS", threads)],
        grid=(stretches * threads, across, rows),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, query_heads * at_once, stretches, each) for each in (size, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return read, _join(shape, dtype, sinks=sinks, in_place=in_place)


@lru_cache(2048)
def _calls_with_beginnings(
    shape: tuple[int, int, int, int], kv_heads: int, dtype: mx.Dtype, scale: float, blocks: int, slots: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The same in place over beginnings, too."""
    rows, query_heads, at_once, size = shape
    kv, of_rows = (
        ("keys", "values", "before_keys", "before_values"),
        ("offset", "padding", "begun", "blocks", "members"),
    )
    read = partial(
        _kernel("tiles", ("queries", *kv, *of_rows), ("part", "about"), in_place=True),
        template=[("T", dtype), ("D", size), ("SCALE", number(scale * _LOG2_E)), ("THREADS", _TILED_THREADS)],
        grid=(blocks * _TILED_THREADS, kv_heads, 1),
        threadgroup=(_TILED_THREADS, 1, 1),
        output_shapes=[(rows, query_heads * at_once, slots, each) for each in (size, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return read, _join(shape, dtype, sinks=False, in_place=True)


def _join(shape: tuple[int, int, int, int], dtype: mx.Dtype, *, sinks: bool, in_place: bool) -> Callable[..., Any]:
    rows, query_heads, at_once, size = shape
    of_join = ("queries",) if in_place else ()
    return partial(
        _kernel("join", ("part", "about", "sinks", *of_join), ("out",), in_place=in_place),
        template=[("T", dtype), ("D", size), ("SINKS", sinks)],
        grid=(rows * query_heads * at_once * size // 4, 1, 1),
        threadgroup=(_JOIN_THREADS, 1, 1),
        output_shapes=[(rows * at_once, query_heads * size) if in_place else shape],
        output_dtypes=[dtype],
    )


def pack(keys: mx.array, values: mx.array, bits: int, group_size: int, words: int) -> tuple[mx.array, mx.array]:
    """Both [rows, KV heads, 1, size], as `Packing.pack` has them."""
    rows, heads, _, size = keys.shape
    pack_both = _kernel("pack", ("keys", "values"), ("packed_keys", "packed_values"))
    packed_keys, packed_values = pack_both(
        inputs=[keys, values],
        template=[("T", keys.dtype), ("D", size), ("BITS", bits), ("GROUP", group_size)],
        grid=(2 * 32, heads, rows),
        threadgroup=(32, 1, 1),
        output_shapes=[(rows, heads, 1, words)] * 2,
        output_dtypes=[mx.uint32] * 2,
    )
    return packed_keys, packed_values


def packs(keys: mx.array, values: mx.array) -> bool:
    """True if the kernel supports the keys and values that a decode step adds."""
    return keys.shape == values.shape and keys.shape[3] in _HEAD_SIZES and keys.dtype == values.dtype


@cache
def install() -> bool:
    """Put the kernels before MLX's attention, in this process, and few shapes; False without CUDA."""
    if not is_on(SWITCH):
        return False
    fused = mx.fast.scaled_dot_product_attention

    def plain_or_fused(
        q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, sinks: Any = None, **others: Any
    ) -> mx.array:
        if not others and scale >= 0 and is_for(q, k, v, mask):
            return attention(q, k, v, scale, mask, sinks)
        if few_shapes.is_for(q, k, v, mask):
            return few_shapes.in_few_shapes(fused, q, k, v, mask, scale=scale, sinks=sinks, **others)
        return fused(q, k, v, scale=scale, mask=mask, sinks=sinks, **others)

    mx.fast.scaled_dot_product_attention = plain_or_fused
    return True
