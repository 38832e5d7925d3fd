"""Plain KV of a batch on CUDA, written and read in place in decode steps.

MLX updates an array in place only if nothing else holds it, and what a step reads is held until it has been computed.
Where the GPU is slower than its host, the next step is given out before that, and copies all KV: of 32 rows of 2,048
positions (8 heads of 128, bfloat16) 134 MB of keys a layer and as much of values, and as much memory again. Here a
kernel writes a row's next keys and values where that row ends (`rotary.cu`), and attention reads all up to there
(`read.cu`, `tiles.cu`). That the one comes after the other is said by the queries, which the former makes and the
latter reads; the next step follows from what the model says in this one. MLX knows of nothing else that it is written:
where a step's logits are not asked for, as of pieces of prompts and of a draft model, it would never be, and before
they are, nobody else may read it. So only steps that are drawn from at once come here (`RowModel`).

Lengths of rows are numbers on the device, and arrays are as long as there is room. So a step's shapes are those of the
step before, and attention is compiled with what lies around it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.kv.cuda import attention as kernels
from worker.engine.kv.ragged import are_plain

log = logging.getLogger(__name__)


def is_for(caches: Sequence[Any], count: int, dtypes: Collection[mx.Dtype], rotary: Any) -> bool:
    """Whether a decode step of such a model may write so many tokens of each row in place in these caches."""
    if count > kernels.MOST_QUERIES or not are_plain(caches):
        return False
    keys, values = caches[0].keys, caches[0].values
    is_typed = dtypes == {keys.dtype} and keys.shape[3] == rotary.size
    return is_typed and kernels.reads_in_place(keys, values) and _runs(type(rotary).of)


@cache
def _runs(rotary_of: Callable[[Any, int], Any]) -> bool:
    """Whether keys and values get where they belong, here and with this MLX."""
    try:
        rotary = rotary_of(nn.RoPE(64), 64)
        qkv = (mx.arange(4 * 4 * 64).reshape(4, 4 * 64) % 11 - 5).astype(mx.bfloat16)
        kv = tuple(mx.full((2, 1, 256, 64), 3.0, mx.bfloat16) for _ in range(2))
        offset_B, padding_B = mx.array([0, 100]), mx.array([2, 7])
        mx.eval(qkv, kv, offset_B, padding_B)
        _, k, v = rotary(qkv, (2, 1, 1), (), 1e-6, offset_B)
        mx.eval(rotary.placed(qkv, (2, 1, 1), (), 1e-6, (offset_B, padding_B), kv))
        for held, new in zip(kv, (k, v), strict=True):
            wanted = mx.full(held.shape, 3.0, held.dtype)
            wanted[0, :, 2:4], wanted[1, :, 107:109] = new[0], new[1]
            if not mx.array_equal(held, wanted):
                log.warning("kv.not_in_place: MLX's own updates write KV")
                return False
    except RuntimeError as error:
        log.warning("kv.not_in_place error=%s: MLX's own updates write KV", error)
        return False
    return True
