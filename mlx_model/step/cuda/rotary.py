"""Queries and keys of a decode step: their norm and their rotary position in one kernel on CUDA (`rotary.cu`).

RoPE: Su et al., arXiv 2104.09864, as MLX has it, halves of a head turned against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE

from mlx_model.cuda import kernel, number
from mlx_model.kv.quantised import Packing
from mlx_model.step.cuda import products

_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
_THREADS = 128  # four heads
_OUTPUTS = ("queries", "keys", "values")
_SOURCE = Path(__file__).with_name("rotary.cu")


@dataclass(frozen=True)
class Rotary:
    """Parameters of the rotary embedding that all layers of a model share."""

    size: int  # of a head
    scale: float
    base: float  # 0: there are periods
    periods: mx.array | None = None  # [size / 2] float32, in positions, over 2 pi

    @classmethod
    def of(cls, rope: Any, size: int) -> Rotary | None:
        """None for what the kernel is not made for."""
        if not products.are_there() or size % 2 or getattr(rope, "dims", 0) != size or rope.traditional:
            return None
        if type(rope) is nn.RoPE and rope.base > 1 and rope.scale >= 0:
            return cls(size, rope.scale, rope.base)
        return cls(size, 1.0, 0.0, rope._freqs) if type(rope) is Llama3RoPE else None

    def __call__(
        self,
        qkv: mx.array,
        heads: Sequence[int],
        norms: Sequence[mx.array],
        eps: float,
        offset_B: mx.array,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """q, k, v [B, heads, L, size] of [B * L, all their heads * size]; `norms` of q and k [size], or none."""
        shapes = [(offset_B.shape[0], count, qkv.shape[0] // offset_B.shape[0], self.size) for count in heads]
        q, k, v = self._turned(qkv, heads, norms, eps, offset_B, {}, dict(zip(_OUTPUTS, shapes, strict=True)))
        return q, k, v

    def placed(
        self,
        qkv: mx.array,
        heads: Sequence[int],
        norms: Sequence[mx.array],
        eps: float,
        rows: Sequence[mx.array],
        kv: Sequence[mx.array],
        packing: Packing | None = None,
    ) -> mx.array:
        """q; k and v are written in place into `kv` [B, heads, positions, size], where each row ends.

        `rows` [B]: positions that each has read, and those before its first one (kv/cuda/place.py). `packing`: how a
        position of `kv` is packed.
        """
        offset_B, padding_B = rows
        shape = offset_B.shape[0], heads[0], qkv.shape[0] // offset_B.shape[0], self.size
        held = {"keys": kv[0], "values": kv[1], "padding": padding_B}
        (q,) = self._turned(qkv, heads, norms, eps, offset_B, held, {"queries": shape}, packing)
        return q

    def _turned(
        self,
        qkv: mx.array,
        heads: Sequence[int],
        norms: Sequence[mx.array],
        eps: float,
        offset_B: mx.array,
        held: dict[str, mx.array],
        outputs: dict[str, tuple[int, ...]],
        packing: Packing | None = None,
    ) -> list[mx.array]:
        inputs = {"qkv": qkv, "offset": offset_B, **held}
        settings: dict[str, Any] = {"T": qkv.dtype, "SIZE": self.size, "SCALE": number(self.scale)}
        headers: tuple[str, ...] = ("#define PLACED",) if held else ()
        if packing is not None:
            settings |= {"BITS": packing.bits, "GROUP": packing.group_size}
            headers += ("#define PACKED", "pack.cuh")
        if self.periods is None:
            settings["LOG2_BASE"] = number(log2(self.base))
        else:
            inputs["periods"] = self.periods
            headers += ("#define PERIODS",)
        if norms:
            inputs |= {"of_queries": norms[0], "of_keys": norms[1]}
            settings["EPS"] = number(eps)
            headers += ("#define NORMED",)
        settings["QUERIES"], settings["KEYS"], _ = heads
        tokens, across = qkv.shape[0], -(-sum(heads) * 32 // _THREADS)
        made: list[mx.array] = kernel(_SOURCE, tuple(inputs), tuple(outputs), headers, copies=not held)(
            inputs=list(inputs.values()),
            template=list(settings.items()),
            grid=(across * _THREADS, tokens, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=list(outputs.values()),
            output_dtypes=[qkv.dtype] * len(outputs),
        )
        return made

    def takes(self, qkv: mx.array, norms: Sequence[mx.array], offset_B: mx.array) -> bool:
        """True if the kernel supports these arrays."""
        is_typed = qkv.dtype in _DTYPES and all(each.dtype == qkv.dtype for each in norms)
        return is_typed and offset_B.dtype == mx.int32 and offset_B.ndim == 1
