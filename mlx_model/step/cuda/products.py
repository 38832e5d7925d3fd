"""Products of a decode step on CUDA: of few rows by `product.cu`, of more by `product_many.cu` and `product_sum.cu`.

MLX asks cuBLAS for these and captures what it does as a graph of its own, which costs the host 14 to 24 us each; one
kernel costs it 4 to 8. Where cuBLAS launches clusters in two dimensions, as for most products of 256 rows on a Hopper,
MLX also builds a graph of 30 operations anew in place of changing one. With one row MLX has a kernel of its own, which
is quicker. What a row's sums are does not depend on how many other rows there are, of 2 to 32, and of more.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from mlx_model.cuda import is_on, is_right, kernel, number

SWITCH = "PARALLM_CUDA_PRODUCTS"  # 0: MLX's own
AT_ONCE = 32  # rows of a block, of few
MOST_ROWS = 256
LARGEST = 128 << 20  # bytes of weights that many rows are multiplied with: those of a 4B were measured
HOPPER = "sm_90"  # what many rows need
_DTYPES = (mx.bfloat16, mx.float16)
_STEP, _STEP_OF_MANY = 32, 64  # inputs that are multiplied at once
# Outputs and warps of a block, and steps that a warp reads ahead. With 4 warps and 4 steps an 8B is a fifth slower at
# 32 rows.
_OF_FEW = (32, 8, 2)
_STAGES = 4  # of many
_OUTPUTS_OF_MANY = (64, 96, 160)
_SPLITS = (1, 2, 3, 4, 6, 8)
_MULTIPROCESSORS, _BYTES_PER_NS = 132, 47  # of an H200, and what each of them reads from its cache
_FULL = _OUTPUTS_OF_MANY[-1] * _MULTIPROCESSORS  # outputs that the widest blocks are made for, of few inputs
_FEW, _MANY, _SUM = (Path(__file__).with_name(f"product{name}.cu") for name in ("", "_many", "_sum"))
_PER = 8  # numbers of 16 bits that a thread adds up, ...
_WIDEST = 1024 * _PER  # ... and those of a row


def are_there() -> bool:
    """True if this process uses the kernels; `is_for` decides by the number of rows."""
    return is_on(SWITCH) and is_right("model.products", SWITCH, _trials_of_few)


@cache
def are_many_there(dtype: mx.Dtype) -> bool:
    """True if the kernel for many rows works with this dtype. It is tried when a model is loaded, not amid a
    request."""
    is_made_for = dtype in _DTYPES and mx.device_info().get("architecture") == HOPPER
    return is_made_for and is_right("model.products_of_many", SWITCH, partial(_trials_of_many, dtype))


def _trials_of_few() -> Iterator[tuple[str, bool]]:
    """It needs tensor cores that know bfloat16 (compute capability 8.0)."""
    yield from _trials(mx.bfloat16, (2, 66, 256))
    made, fed, norm = (_whole(rows, 72).astype(mx.bfloat16) for rows in (3, 3, 1))
    added, normed = added_and_normed(made, fed + 1, norm[0], 1e-6)
    exact = mx.fast.rms_norm(made + fed + 1, norm[0], 1e-6).astype(mx.float32)
    is_so = mx.array_equal(added, made + fed + 1) and mx.abs(normed - exact).max() <= 0.02 * mx.abs(exact).max()
    yield "added and normed", bool(is_so)


def _trials_of_many(dtype: mx.Dtype) -> Iterator[tuple[str, bool]]:
    """Blocks of 64 and 160 outputs, and stretches; the widest have no register to spare."""
    shapes = (AT_ONCE + 1, 66, 256), (70, 200, 4096), (MOST_ROWS, 2560, 4096), (MOST_ROWS, _FULL, 64)
    yield from _trials(dtype, *shapes)
    x, weight = _whole(MOST_ROWS, 64) / 3, _whole(_FULL, 64) / 4
    exact = swiglu(*mx.split(x @ weight.T, 2, axis=-1))
    made = gated(x.astype(dtype), weight.astype(dtype)).astype(mx.float32)
    yield f"gated {dtype}", bool(mx.abs(made - exact).max() <= 0.05 * mx.abs(exact).max())


def _trials(dtype: mx.Dtype, *shapes: tuple[int, int, int]) -> Iterator[tuple[str, bool]]:
    for rows, outputs, inputs in shapes:
        x, weight = _whole(rows, inputs), _whole(outputs, inputs)
        made, exact = product(x.astype(dtype), weight.astype(dtype)), x @ weight.T
        yield f"{dtype} rows={rows} outputs={outputs}", bool(mx.array_equal(made, exact.astype(dtype)))


def _whole(rows: int, inputs: int) -> mx.array:
    """Numbers that a product sums up to the same in any order."""
    return ((mx.arange(rows * inputs).reshape(rows, inputs) * 37 // 11) % 7 - 3).astype(mx.float32)


def is_for(x: mx.array, weight: mx.array) -> bool:
    """True if the kernels support x [rows, in] and weights [out, in]."""
    rows, inputs = x.shape
    if rows <= AT_ONCE:
        is_sized = rows > 1 and inputs % _STEP == 0
    else:
        is_sized = rows <= MOST_ROWS and _is_for_many(weight.nbytes, inputs)
    return is_sized and x.dtype in _DTYPES and weight.dtype == x.dtype and (rows <= AT_ONCE or are_many_there(x.dtype))


def _is_for_many(nbytes: int, inputs: int) -> bool:
    """True of weights of so many bytes and inputs, if the kernel of many rows supports them."""
    return nbytes <= LARGEST and inputs % _STEP_OF_MANY == 0


def product(x: mx.array, weight: mx.array) -> mx.array:
    """x W^T [rows, out], summed in float32."""
    return whole(parts(x, weight), x.dtype)


def whole(made: mx.array, dtype: mx.Dtype) -> mx.array:
    """A product [rows, out], of itself or its `parts`."""
    return made if made.ndim == 2 else _summed(made, dtype)[0]


def gated(x: mx.array, weight: mx.array) -> mx.array:
    """SwiGLU of the halves of x W^T, [rows, out / 2]: products are rounded as by themselves, the sigmoid once."""
    return parts(x, weight, is_gated=True)


def parts(x: mx.array, weight: mx.array, *, is_gated: bool = False) -> mx.array:
    """x W^T [rows, out], or the sums of stretches of the inputs [stretches, rows, out] in float32."""
    rows, width = x.shape[0], weight.shape[0] // 2 if is_gated else weight.shape[0]
    source, memory, splits = _FEW, 0, 1
    if rows <= AT_ONCE:
        outputs, warps, ahead = _OF_FEW
        settings = {"ROWS": 8 if rows <= 8 else 16 if rows <= 16 else AT_ONCE, "WARPS": warps, "AHEAD": ahead}
    else:
        outputs, splits = blocks_of_many(*weight.shape, is_gated=is_gated)
        groups = -(-rows // 64)
        source, warps = _MANY, 4 * groups
        memory = _STAGES * (groups * 64 + outputs) * _STEP_OF_MANY * 2 + 1024
        settings = {"SPLITS": splits, "GROUPS": groups, "STAGES": _STAGES}
    headers = ("tensor_cores.cuh", "warpgroups.cuh") if source is _MANY else ("tensor_cores.cuh",)
    (y,) = kernel(source, ("x", "weight"), ("y",), headers, shared_memory=memory)(
        inputs=[x, weight],
        template=[("T", x.dtype), ("GATED", is_gated), ("OUTPUTS", outputs), *settings.items()],
        grid=(-(-weight.shape[0] // outputs) * 32 * warps, splits, 1),
        threadgroup=(32 * warps, 1, 1),
        output_shapes=[(rows, width) if splits == 1 else (splits, rows, width)],
        output_dtypes=[x.dtype if splits == 1 else mx.float32],
    )
    return cast(mx.array, y)


def adds_and_norms(fed: mx.array, norm: mx.array) -> bool:
    """True if `added_and_normed` supports these arrays on this device."""
    width = norm.size
    is_whole = width % _PER == 0 and width <= _WIDEST
    return fed.dtype in _DTYPES and fed.dtype == norm.dtype and is_whole and are_there()


def added_and_normed(made: mx.array, fed: mx.array, norm: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """Sum of `fed` [rows, out] and a product, or the `parts` of one; and its weighted RMS norm."""
    added, normed = _summed(made, fed.dtype, eps, fed=fed, norm=norm)
    return added, normed


def _summed(parts: mx.array, dtype: mx.Dtype, eps: float = 0.0, **others: mx.array) -> list[mx.array]:
    """[rows, out] of `parts`; or both of `added_and_normed`, with `others` what the layer was fed and the norm's."""
    rows, width = parts.shape[-2:]
    threads = -(-width // _PER // 32) * 32
    settings = {"WIDTH": width, "PARTS": 1 if parts.ndim == 2 else parts.shape[0], "THREADS": threads}
    outputs = ("out", "normed") if others else ("out",)
    headers = ("#define NORMED", "add_and_norm.cuh") if others else ()
    made: list[mx.array] = kernel(_SUM, ("parts", *others), outputs, headers)(
        inputs=[parts, *others.values()],
        template=[("T", dtype), ("P", parts.dtype), *settings.items(), ("EPS", number(eps))],
        grid=(rows * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, width)] * len(outputs),
        output_dtypes=[dtype] * len(outputs),
    )
    return made


def parts_of_many(outputs: int, inputs: int, dtype: mx.Dtype) -> int:
    """How many `parts` a product of many rows by weights [outputs, inputs] has; 1 where MLX computes it."""
    if not (_is_for_many(outputs * inputs * dtype.size, inputs) and are_there() and are_many_there(dtype)):
        return 1
    return blocks_of_many(outputs, inputs, is_gated=False)[1]


@cache
def blocks_of_many(outputs: int, inputs: int, *, is_gated: bool) -> tuple[int, int]:
    """Outputs of a block, and stretches of the inputs."""
    return min(
        ((width, splits) for width in _OUTPUTS_OF_MANY for splits in _SPLITS if splits == 1 or not is_gated),
        key=lambda blocks: _ns_of_many(outputs, inputs, *blocks),
    )


def _ns_of_many(outputs: int, inputs: int, width: int, splits: int) -> float:
    """About what 256 rows take, in ns: a block waits for what it reads, and all of them for sums of stretches."""
    if splits > 1 and (outputs % _PER or outputs > _WIDEST):
        return inf
    steps, blocks = -(-inputs // _STEP_OF_MANY // splits), -(-outputs // width) * splits
    read = (MOST_ROWS + width) * _STEP_OF_MANY * 2
    added_up = 4000 + splits * outputs * MOST_ROWS * 4 * 2 / 4000 if splits > 1 else 0
    return -(-blocks // _MULTIPROCESSORS) * (steps * read / _BYTES_PER_NS + 3000) + added_up
