"""KV of a batch on CUDA, plain or packed, written and read in place in decode steps.

MLX updates an array in place only if nothing else holds it, and what a step reads is held until it has been computed.
Where the GPU is slower than its host, the next step is given out before that, and copies all KV: of 32 rows of 2,048
positions (8 heads of 128, bfloat16) 134 MB of keys a layer and as much of values, and as much memory again. Here a
kernel writes a row's next keys and values where that row ends (`rotary.cu`), and attention reads all up to there
(`read.cu`, `tiles.cu`). That the one comes after the other is said by the queries, which the former makes and the
latter reads; the next step follows from what the model says in this one. MLX knows of nothing else that it is written:
where a step's logits are not asked for, as of pieces of prompts and of a draft model, it would never be, and before
they are, nothing else may read it. So only steps that are drawn from at once come here (`RowModel`).

Lengths of rows are numbers on the device, and arrays are as long as there is room. So a step's shapes are those of the
step before, and attention is compiled with what lies around it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_model.cuda import passes
from mlx_model.kv.cuda import attention as kernels
from mlx_model.kv.cuda.beginnings import blocks_of
from mlx_model.kv.quantised import Packing
from mlx_model.kv.ragged import RaggedKVCache, may_be_in_place, packing_of
from mlx_model.kv.shared import Groups, Pair, SharedKVCache, SharedRead

log = logging.getLogger(__name__)


def is_for(caches: Sequence[Any], count: int, dtypes: Collection[mx.Dtype], rotary: Any) -> bool:
    """True if a decode step may write `count` tokens of each row in place in these caches."""
    has_beginnings = isinstance(caches[0], SharedKVCache)
    if count > kernels.MOST_QUERIES or not may_be_in_place(caches, SharedKVCache if has_beginnings else None):
        return False
    packing, (keys, values) = packing_of(caches), (caches[0].keys, caches[0].values)
    dtype, width = (keys.dtype, rotary.size) if packing is None else (packing.dtype, packing.words(rotary.size))
    is_shaped = dtypes == {dtype} and keys.shape == values.shape and keys.shape[3] == width
    if not (is_shaped and kernels.reads_in_place(rotary.size, dtype) and _runs(type(rotary).of, packing)):
        return False
    leaf = caches[0]
    return not has_beginnings or (
        leaf.form == "keys" and bool(leaf.groups.keys) and _reads_beginnings(rotary.size, keys.dtype)
    )


def reads_beginnings(dtypes: Collection[mx.Dtype], rotary: Any) -> bool:
    """True if decode steps may read beginnings that rows have in common in place, of plain KV; compiled by this."""
    return len(dtypes) == 1 and _reads_beginnings(rotary.size, *dtypes) and _runs(type(rotary).of, None)


@cache
def _runs(rotary_of: Callable[[Any, int], Any], packing: Packing | None) -> bool:
    """True if the kernel writes keys and values to the right places on this machine, with this MLX."""
    size = 64 if packing is None else max(64, packing.group_size)
    dtype = mx.bfloat16 if packing is None else packing.dtype
    try:
        rotary = rotary_of(nn.RoPE(size), size)
        qkv = (mx.arange(4 * 4 * size).reshape(4, 4 * size) % 11 - 5).astype(dtype)
        new = rotary(qkv, (2, 1, 1), (), 1e-6, offset_B := mx.array([0, 100]))[1:]
        held = mx.full((2, 1, 256, size), 3.0, dtype)
        if packing is not None:
            held, *new = (packing.pack(each) for each in (held, *new))
        kv, padding_B = tuple(held + 0 for _ in range(2)), mx.array([2, 7])  # of their own memory
        mx.eval(qkv, kv, offset_B, padding_B)
        mx.eval(rotary.placed(qkv, (2, 1, 1), (), 1e-6, (offset_B, padding_B), kv, packing))
        for each, own in zip(kv, new, strict=True):
            wanted = held + 0
            wanted[0, :, 2:4], wanted[1, :, 107:109] = own[0], own[1]
            if not mx.array_equal(each, wanted):
                log.warning("kv.not_in_place: MLX's own updates write KV")
                return False
    except RuntimeError as error:
        log.warning("kv.not_in_place error=%s: MLX's own updates write KV", error)
        return False
    return True


@cache
def _reads_beginnings(size: int, dtype: mx.Dtype) -> bool:
    """True if the kernel reads beginnings as plain operations do, on this machine, with this MLX."""
    may = kernels.reads_beginnings(size, dtype)
    return may and passes("kv.beginnings", kernels.SWITCH, partial(_trials, size, dtype))


def _trials(size: int, dtype: mx.Dtype) -> Iterator[tuple[str, bool]]:
    lengths: dict[Hashable, int] = {"both": 300, "first": 70, "other": 40}
    groups = Groups((("both", "first"), ("both", "other"), (), ("both", "first"), ("both",)))
    rows, kv_heads, room = len(groups.chains), 2, 128
    end_B, padding_B = mx.array([65, 65, 17, 10, 50]), mx.array([60, 5, 0, 1, 20])  # as own positions lie
    keys = iter(mx.random.split(mx.random.key(0), 4 + 2 * len(lengths)))

    def drawn(*shape: int) -> mx.array:
        return mx.random.normal(shape, dtype, key=next(keys))

    own = RaggedKVCache([0] * rows)
    own.state = drawn(rows, kv_heads, room, size), drawn(rows, kv_heads, room, size), end_B, padding_B, room
    beginnings: dict[Hashable, Pair] = {
        key: (drawn(1, kv_heads, of, size), drawn(1, kv_heads, of, size)) for key, of in lengths.items()
    }
    leaf = SharedKVCache(own, groups, {**beginnings})
    for each, count in ((2, 1), (3, 4)):
        queries = drawn(rows, kv_heads * each, count, size)
        blocks = blocks_of(leaf, room, each * count)
        of_rows = (end_B - padding_B + blocks.begun_B, padding_B - blocks.begun_B, blocks.begun_B, *blocks.arrays)
        kv = (own.keys, own.values, *leaf.in_line())
        out = kernels.attention_in_place(queries, kv, size**-0.5, of_rows, slots=blocks.slots)
        seen = mx.arange(room) <= (end_B[:, None] + mx.arange(count))[:, None, :, None]
        seen &= mx.arange(room) >= padding_B[:, None, None, None]
        wanted = SharedRead(groups, {**beginnings}, kv[:2], "keys").attended(queries, size**-0.5, seen)
        apart = out.reshape(rows, count, -1, size).swapaxes(1, 2).astype(mx.float32) - wanted.astype(mx.float32)
        yield f"{each} heads {count} queries", bool((mx.abs(apart).max() < 0.03).item())
