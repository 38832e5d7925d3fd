"""Products of a decode step on CUDA, one kernel each: of few rows (`product.cu`), and of more (`product_many.cu`).

MLX asks cuBLAS for these and captures what it does as a graph of its own, which costs the host 14 to 24 us each; one
kernel costs it 7 to 10. It takes the GPU as long as cuBLAS's, and a decode step takes its host's time wherever that is
longer. With one row MLX has a kernel of its own, which is quicker. Products of more than 32 rows, as where drafts are
checked, read weights several times over, which small ones stand. What a row's sums are does not depend on how many
other rows there are, of 2 to 32, and of more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from worker.engine.cuda import is_on, is_right, kernel

SWITCH = "PARALLM_CUDA_PRODUCTS"  # 0: MLX's own
AT_ONCE = 32  # rows of a block, of few
MOST_ROWS = 256  # by weights of `SMALL` bytes at most
SMALL = 16 << 20  # they stay in an H100's cache of 50 MB
_DTYPES = (mx.bfloat16, mx.float16)
_STEP, _STEP_OF_MANY = 32, 64  # inputs that are multiplied at once
# Outputs and warps of a block, and steps that a warp reads ahead. With 4 warps and 4 steps an 8B is a fifth slower at
# 32 rows.
_OF_FEW = (32, 8, 2)
_ROWS_OF_MANY = 64  # of a block
_BLOCKS = 132  # an H100's multiprocessors: with fewer blocks of 64 outputs these have 32
_FEW, _MANY = (Path(__file__).with_name(name) for name in ("product.cu", "product_many.cu"))


def are_there() -> bool:
    """Whether this process computes by the kernel."""
    return is_on(SWITCH) and is_right("model.products", SWITCH, _trials)


def _trials() -> Iterator[tuple[str, bool]]:
    """It needs tensor cores that know bfloat16 (compute capability 8.0)."""
    for rows, outputs in ((2, 66), (AT_ONCE + 1, 66), (AT_ONCE + 1, 64 * _BLOCKS)):
        x, weight = (mx.arange(count * 256).reshape(count, 256) % by - 3 for count, by in ((rows, 7), (outputs, 5)))
        exact = x.astype(mx.float32) @ weight.astype(mx.float32).T  # of whole numbers: in any order
        made = product(x.astype(mx.bfloat16), weight.astype(mx.bfloat16))
        yield f"rows={rows}", bool(mx.array_equal(made, exact.astype(mx.bfloat16)))


def is_for(x: mx.array, weight: mx.array) -> bool:
    """Whether the kernel is made for x [rows, in] and weights [out, in]."""
    rows, inputs = x.shape
    if rows <= AT_ONCE:
        is_sized = rows > 1 and inputs % _STEP == 0
    else:
        is_sized = rows <= MOST_ROWS and weight.nbytes <= SMALL and inputs % _STEP_OF_MANY == 0
    return is_sized and x.dtype in _DTYPES and weight.dtype == x.dtype


def product(x: mx.array, weight: mx.array) -> mx.array:
    """x W^T [rows, out], summed in float32."""
    return _made(x, weight, weight.shape[0], is_gated=False)


def gated(x: mx.array, weight: mx.array) -> mx.array:
    """SwiGLU of the halves of x W^T, [rows, out / 2]: products are rounded as by themselves, the sigmoid once."""
    return _made(x, weight, weight.shape[0] // 2, is_gated=True)


def _made(x: mx.array, weight: mx.array, width: int, *, is_gated: bool) -> mx.array:
    rows = x.shape[0]
    settings: dict[str, Any] = {"T": x.dtype, "GATED": is_gated}
    if rows <= AT_ONCE:
        outputs, warps, ahead = _OF_FEW
        source, at_once = _FEW, 8 if rows <= 8 else 16 if rows <= 16 else AT_ONCE
        settings |= {"ROWS": at_once, "OUTPUTS": outputs, "WARPS": warps, "AHEAD": ahead}
    else:
        source, at_once, warps = _MANY, _ROWS_OF_MANY, 4
        outputs = 64 if weight.shape[0] * -(-rows // at_once) >= 64 * _BLOCKS else 32
        settings |= {"OUTPUTS": outputs}
    made, threads = outputs // 2 if is_gated else outputs, 32 * warps
    (y,) = kernel(source, ("x", "weight"), ("y",), ("tensor_cores.cuh",))(
        inputs=[x, weight],
        template=list(settings.items()),
        grid=(-(-width // made) * threads, -(-rows // at_once), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, width)],
        output_dtypes=[x.dtype],
    )
    return cast(mx.array, y)
