"""What kernels of deltas make of a layer's numbers, where they also do what follows, beside MLX's operations."""

import mlx.core as mx

from mlx_model.lora.deltas import deltas_of
from mlx_model.lora.kernels import one_pass_gated, one_pass_normed


def normal(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)) * 0.3


def in_parts(y: mx.array) -> mx.array:
    """Three numbers in float32 for each of y, whose sum it is."""
    return mx.stack([y / 4, y * 2, y * -5 / 4]).astype(mx.float32)


def ended(
    inputs: int, width: int, rank: int, dtype: mx.Dtype, *, parts: bool = False, norms: bool = True
) -> list[tuple[mx.array, mx.array]]:
    """By the kernels that also do what follows in a layer, and by MLX's operations in fp32; two rows are the base's.

    `parts`: outputs come in parts. `norms`: also of the residual and the norm.
    """
    rows = 5
    a, bs = normal(0, 3, inputs, 2 * rank).astype(dtype), [normal(at, 3, rank, width).astype(dtype) for at in (1, 2)]
    a[0] = 0
    x, y, fed = (normal(seed, rows, size).astype(dtype) for seed, size in ((3, inputs), (4, 2 * width), (5, width)))
    norm, slots = normal(6, width).astype(dtype), mx.array([2, 0, 1, 1, 0], mx.uint32)
    own, form = a[..., :rank] + 0, in_parts if parts else mx.contiguous
    gated = one_pass_gated(x, a, bs, form(y), slots)
    ended_by_norm = one_pass_normed(x, own, bs[0], form(y[:, :width] + 0), slots, fed, norm, 1e-5) if norms else ()
    wide = [each.astype(mx.float32) for each in (x[:, None], a, own, *bs, y, fed, norm)]
    x, a, own, b_gate, b_up, y, fed, norm = wide
    gate, up = (
        part + delta[:, 0]
        for part, delta in zip(mx.split(y, 2, axis=-1), deltas_of(x, a, [b_gate, b_up], slots, "take"), strict=True)
    )
    pairs = [(gated, gate * mx.sigmoid(gate) * up)]
    if norms:
        whole = y[:, :width] + deltas_of(x, own, [b_gate], slots, "take")[0][:, 0] + fed
        pairs += zip(ended_by_norm, (whole, mx.fast.rms_norm(whole, norm, 1e-5)), strict=True)
    return pairs
