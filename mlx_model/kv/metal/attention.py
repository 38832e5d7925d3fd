"""Attention of decode steps on Metal over packed KV (`kv/quantised.py`), which is read once, as it is packed.

MLX's operations unpack all of it first: a number of 8 bits is read as 1.06 bytes, written as 2 and read again, 5.1
bytes in place of 1.06, where plain KV takes 2.

- `read.metal`: a threadgroup reads a stretch of one row's positions, for up to four queries that share a KV head;
- `join.metal`: adds up the stretches, where few rows leave most of a GPU without work;
- `pack.metal`: packs what a step adds, keys and values in one operation in place of nine.

`timed()` compares their numbers with those of MLX's operations, and their times; `kv/layout.py` uses them if both speak
for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from math import e, log2
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx

from mlx_model.cuda import passes
from mlx_model.metal import FEW, is_on, kernel

SWITCH = "PARALLM_METAL_KV"  # 0: MLX's operations
MOST_QUERIES = 8  # of a row: its last token and a draft of seven
_HERE = Path(__file__).parent
_HEAD_SIZES = (64, 128, 256)
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
_SHORTEST = 64  # positions
_SIMDS = 8  # simdgroups of a threadgroup, which reads as many positions at a time
_QUERIES = 4  # of a threadgroup
_GROUPS = 320  # threadgroups that busy a large GPU: eight for each of 40 cores
_STRETCH = 128  # positions of a threadgroup, at least
_TRIAL_ROWS, _TRIAL_POSITIONS, _TRIAL_SHARED = 4, 1030, 4
_ROUNDS, _CALLS = 5, 8
CLOSE = 0.02  # of the largest number: how far a kernel may be from MLX's operations


class AttentionShape(NamedTuple):
    """Shapes and types that a kernel is made for."""

    kv_heads: int
    size: int
    dtype: mx.Dtype
    bits: int
    group_size: int


def is_switched_on() -> bool:
    """True if this process may compute with these kernels."""
    return is_on(SWITCH)


def is_for(queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> bool:
    """True if the kernel supports these arrays; shapes as in `attention`."""
    _, _, at_once, size = queries.shape
    masked = isinstance(mask, mx.array)
    return (
        (at_once == 1 or (at_once <= MOST_QUERIES and masked))
        and size in _HEAD_SIZES
        and queries.dtype in _DTYPES
        and keys.shape == values.shape
        and keys.shape[2] >= _SHORTEST
        and (not masked or bool(mask.dtype == mx.bool_ and mask.ndim == 4 and mask.shape[1] == 1))
    )


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, bits: int, group_size: int
) -> mx.array:
    """[rows, heads, queries, size] for queries of that shape; keys and values [rows, KV heads, positions, words]."""
    rows, _, at_once, _ = queries.shape
    _, kv_heads, positions, _ = keys.shape
    masked = isinstance(mask, mx.array)
    seen = mx.broadcast_to(mask, (rows, 1, at_once, positions)) if masked else _nothing()
    read, join = _calls(queries.shape, kv_heads, positions, queries.dtype, masked, bits, group_size)
    found = read(inputs=[queries, keys, values, seen, _scalar(scale * log2(e))])
    return cast(mx.array, (found if join is None else join(inputs=found))[0])


def packs(keys: mx.array, values: mx.array) -> bool:
    """True if the kernel supports the keys and values that a decode step adds."""
    return keys.shape == values.shape and keys.shape[3] in _HEAD_SIZES and keys.dtype == values.dtype


def pack(keys: mx.array, values: mx.array, bits: int, group_size: int, words: int) -> tuple[mx.array, mx.array]:
    """Both [rows, KV heads, 1, size], as `Packing.pack` has them."""
    rows, heads, _, size = keys.shape
    packed_keys, packed_values = _pack(bits, group_size)(
        inputs=[keys, values],
        template=[("T", keys.dtype), ("D", size), ("BITS", bits), ("GROUP", group_size)],
        grid=(2 * 32, heads, rows),
        threadgroup=(32, 1, 1),
        output_shapes=[(rows, heads, 1, words)] * 2,
        output_dtypes=[mx.uint32] * 2,
    )
    return packed_keys, packed_values


@cache
def _nothing() -> mx.array:
    return mx.zeros((1, 1, 1, 1), mx.bool_)


@cache
def _scalar(value: float) -> mx.array:
    return mx.array(value, mx.float32)


@cache
def _pack(bits: int, group_size: int) -> Any:
    return kernel(_HERE / "pack.metal", ("keys", "values"), ("packed_keys", "packed_values"))


@lru_cache(2048)
def _calls(
    shape: tuple[int, int, int, int],
    kv_heads: int,
    positions: int,
    dtype: mx.Dtype,
    masked: bool,
    bits: int,
    group_size: int,
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Both kernels, but for their inputs; one, where there is one stretch. All layers of a step ask for the same."""
    rows, heads, at_once, size = shape
    shared_by = heads // kv_heads * at_once
    at_a_time = min(_QUERIES, shared_by)
    across = kv_heads * -(-shared_by // at_a_time)
    stretches = 1
    while stretches * rows * across < _GROUPS and stretches * 2 * _STRETCH <= positions:
        stretches *= 2
    count = rows * heads * at_once
    common = [("T", dtype), ("D", size), ("STRETCHES", stretches)]
    template = [
        *common, ("BITS", bits), ("GROUP", group_size), ("HEADS", at_a_time), ("SHARED_BY", shared_by),
        ("SIMDS", _SIMDS), ("MASKED", masked),
    ]  # fmt: skip
    whole = stretches == 1
    results = {"out": (shape, dtype)} if whole else {
        "part": ((count, stretches, size), mx.float32), "about": ((count, stretches, 2), mx.float32)
    }  # fmt: skip
    headers = ("packed.metal", *(["#define WHOLE"] if whole else []))
    read = partial(
        kernel(_HERE / "read.metal", ("queries", "keys", "values", "mask", "scale"), tuple(results), headers),
        template=template,
        grid=(stretches * _SIMDS * 32, across, rows),
        threadgroup=(_SIMDS * 32, 1, 1),
        output_shapes=[each for each, _ in results.values()],
        output_dtypes=[each for _, each in results.values()],
    )
    if whole:
        return read, None
    few = ("#define FEW",) if 2 * stretches * count < FEW else ()
    join = partial(
        kernel(_HERE / "join.metal", ("part", "about"), ("out",), few),
        template=common,
        grid=(count * size, 1, 1),
        threadgroup=(min(256, count * size), 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
    )
    return read, join


class KernelTrial:
    """Some rows' packed KV, to compare and time the kernels with MLX's operations."""

    def __init__(self, shape: AttentionShape, of: Any) -> None:
        """`of`: the `Packing`, whose operations are MLX's."""
        self._shape, self._packing = shape, of
        kv_heads, size, dtype, *_ = shape

        def draw(seed: int, *sizes: int) -> mx.array:
            return mx.random.normal(sizes, key=mx.random.key(seed)).astype(dtype)

        self.queries = draw(0, _TRIAL_ROWS, kv_heads * _TRIAL_SHARED, 1, size)
        self._plain = [draw(seed, _TRIAL_ROWS, kv_heads, _TRIAL_POSITIONS, size) for seed in (1, 2)]
        self._packed = [of.pack(each) for each in self._plain]
        first = mx.arange(_TRIAL_ROWS)[:, None] * 7  # rows of several lengths
        self._mask = (mx.arange(_TRIAL_POSITIONS)[None] >= first)[:, None, None]
        self._scale = size**-0.5

    def by_kernels(self, queries: mx.array) -> mx.array:
        """Attention that reads packed KV."""
        _, _, _, bits, group_size = self._shape
        keys, values = self._packed
        return attention(queries, keys, values, self._scale, self._mask, bits, group_size)

    def plain(self, queries: mx.array) -> mx.array:
        """Attention over KV that is not packed."""
        keys, values = self._plain
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self._scale, mask=self._mask)

    def unpacked(self, queries: mx.array) -> mx.array:
        """Attention over KV that MLX's operations unpack."""
        keys, values = (self._packing.unpack(each, self._shape.size) for each in self._packed)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self._scale, mask=self._mask)

    def compared(self) -> Iterator[tuple[str, bool]]:
        """For each kernel, True if its numbers are those of MLX's operations."""
        yield "attention", _is_close(self.by_kernels(self.queries), self.unpacked(self.queries))
        newest, packing = [each[:, :, :1] for each in self._plain], self._packing
        _, size, _, bits, group_size = self._shape
        found = pack(newest[0], newest[1], bits, group_size, packing.words(size))
        for each, own in zip(newest, found, strict=True):
            yield "packing", _is_close(packing.unpack(own, size), packing.unpack(packing.pack(each), size))

    def seconds(self, way: Callable[[mx.array], mx.array]) -> float:
        """Least time of one call, of several of which each one waits for the one before it, as layers do."""
        times = []
        for _ in range(_ROUNDS):
            queries, began = self.queries, time.perf_counter()
            for _ in range(_CALLS):
                queries = way(queries)
            mx.eval(queries)
            times.append((time.perf_counter() - began) / _CALLS)
        return min(times)


def _is_close(one: mx.array, other: mx.array) -> bool:
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    return bool((mx.max(mx.abs(one - other)) <= CLOSE * mx.max(mx.abs(other))).item())


def timed(shape: AttentionShape, packing: Any) -> dict[str, float]:
    """Seconds of a layer's attention: "plain", "unpacked" by MLX's operations, "packed" if the kernels are right."""
    trial = KernelTrial(shape, packing)
    times = {"plain": trial.seconds(trial.plain), "unpacked": trial.seconds(trial.unpacked)}
    if is_switched_on() and shape.size in _HEAD_SIZES and passes("kv_kernels", SWITCH, trial.compared):
        times["packed"] = trial.seconds(trial.by_kernels)
    return times
