"""Kernels for Metal against MLX's operations: on a Mac by its GPU, elsewhere by the shim, which also has to find faults
that are put into each of them.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import pytest

from mlx_model.device import PRETENDS
from mlx_model.kv.metal.attention import attention, pack
from mlx_model.kv.quantised import Packing
from mlx_model.lora.deltas import deltas_of
from mlx_model.lora.kernels import one_pass, one_pass_joined
from tests.engine.ended_layers import ended, in_parts, normal
from tests.msl import shim
from tests.msl.shim import COMPILER, OutsideError, ShimKernel, StuckError

HAS_METAL = mx.metal.is_available()
needs_shim = pytest.mark.skipif(HAS_METAL or COMPILER is None, reason="needs a C++ compiler, and no Metal")

ONE = (8, 1, 1)  # threadgroup
CLOSE = {mx.float32: 1e-3 if HAS_METAL else 1e-5, mx.bfloat16: 2e-2, mx.float16: 3e-3}  # of the largest number


class Faulty:
    """Makes kernels with a fault: some text of theirs is replaced."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new, self.found = old, new, False

    def __call__(self, **kernel: Any) -> ShimKernel:
        texts = {part: kernel.get(part, "") for part in ("header", "source")}
        self.found |= any(self._old in text for text in texts.values())
        name = f"{kernel['name']}, {self._new}"
        faulty = {part: text.replace(self._old, self._new) for part, text in texts.items()}
        return ShimKernel(**(kernel | {"name": name} | faulty))


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process takes Metal's branches, and where there is none the shim runs its kernels."""
    if HAS_METAL:
        return monkeypatch
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setenv(PRETENDS, "1")
    monkeypatch.setattr(mx.fast, "metal_kernel", ShimKernel)
    return monkeypatch


def assert_close(found: mx.array, wanted: mx.array, dtype: mx.Dtype) -> None:
    assert found.dtype == dtype and found.shape == wanted.shape
    apart = mx.max(mx.abs(found.astype(mx.float32) - wanted.astype(mx.float32))).item()
    assert apart <= CLOSE[dtype] * mx.max(mx.abs(wanted.astype(mx.float32))).item()  # type: ignore[operator]


@needs_shim
def test_a_barrier_that_some_threads_do_not_reach_is_found() -> None:
    kernel = ShimKernel(
        "some",
        ["x"],
        ["o"],
        "if (thread_position_in_grid.x < 5) threadgroup_barrier(mem_flags::mem_none); o[0] = x[0];",
    )
    with pytest.raises(StuckError):
        kernel(
            inputs=[mx.ones(8)], grid=(8, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(8,)], output_dtypes=[mx.float32]
        )


@needs_shim
def test_what_is_written_outside_is_found() -> None:
    kernel = ShimKernel("out", ["x"], ["o"], "o[thread_position_in_grid.x + 1] = x[thread_position_in_grid.x];")
    with pytest.raises(OutsideError):
        kernel(
            inputs=[mx.ones(8)], grid=(8, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(8,)], output_dtypes=[mx.float32]
        )


@needs_shim
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_sixteen_bit_numbers_are_mlx_s(dtype: mx.Dtype) -> None:
    bits = mx.random.randint(0, 1 << 30, (1 << 14,), key=mx.random.key(0)).astype(mx.uint32) * 4 + 1
    x, every = mx.view(bits, mx.float32), mx.view(mx.arange(1 << 16).astype(mx.uint16), dtype)
    kind = shim.TYPES[dtype]
    kernel = ShimKernel(
        f"numbers_{kind}", ["x", "all"], ["o", "back"],
        f"uint i = thread_position_in_grid.x; if (i < {x.size}) o[i] = {kind}(x[i]); back[i] = all[i];",
    )  # fmt: skip
    found, back = kernel(
        inputs=[x, every], grid=(1 << 16, 1, 1), threadgroup=(256, 1, 1),
        output_shapes=[x.shape, every.shape], output_dtypes=[dtype, mx.float32],
    )  # fmt: skip
    assert mx.array_equal(found, x.astype(dtype), equal_nan=True).item()
    assert mx.array_equal(back, every.astype(mx.float32), equal_nan=True).item()


LORA = [  # inputs, outputs, rank, rows
    (72, (40, 2056, 8), 8, 5),
    (520, (24,), 32, 3),
    (8, (16, 8), 256, 2),
]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs", "rank", "rows"), LORA)
def test_lora_of_mixed_rows_is_what_mlx_computes(
    metal: pytest.MonkeyPatch, inputs: int, outputs: tuple[int, ...], rank: int, rows: int, dtype: mx.Dtype
) -> None:
    found, wanted = lora(inputs, outputs, rank, rows, dtype)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, dtype)


def lora(
    inputs: int, outputs: tuple[int, ...], rank: int, rows: int, dtype: mx.Dtype
) -> tuple[list[mx.array], list[mx.array]]:
    """By the kernel, and by MLX's operations in fp32; the second row is the base's."""
    a = normal(0, 3, inputs, len(outputs) * rank).astype(dtype)
    bs = [normal(at, 3, rank, each).astype(dtype) for at, each in enumerate(outputs)]
    x = normal(7, rows, 1, inputs).astype(dtype)
    ys = [normal(at, rows, 1, each).astype(dtype) for at, each in enumerate(outputs)]
    a[0] = 0
    slots = mx.array(([2, 0, 1] * rows)[:rows], mx.uint32)
    wide = [each.astype(mx.float32) for each in bs]
    deltas = deltas_of(x.astype(mx.float32), a.astype(mx.float32), wide, slots, "take")
    return one_pass(x, a, bs, ys, slots), [y + delta for y, delta in zip(ys, deltas, strict=True)]


def test_lora_of_joined_outputs_leaves_others_as_they_are(metal: pytest.MonkeyPatch) -> None:
    widths, places, rank = (24, 16, 2064), (0, 2), 8
    a, bs = normal(0, 2, 40, 2 * rank), [normal(at, 2, rank, widths[at]) for at in places]
    x, y, slots = normal(3, 3, 40), normal(4, 3, sum(widths)), mx.array([1, 0, 1], mx.uint32)
    a[0] = 0
    found = one_pass_joined(x, a, bs, y, slots, widths, places)
    first, last = deltas_of(x[:, None], a, bs, slots, "take")
    wanted = y + mx.concatenate([first[:, 0], mx.zeros((3, 16)), last[:, 0]], axis=1)
    assert_close(found, wanted, mx.float32)
    assert_close(one_pass_joined(x, a, bs, in_parts(y), slots, widths, places), wanted, mx.float32)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("inputs", "width", "rank"), [(72, 136, 8), (520, 2048, 32), (8, 16, 128)])
@pytest.mark.parametrize("parts", [False, True])
def test_what_follows_lora_in_a_layer_is_what_mlx_computes(
    metal: pytest.MonkeyPatch, inputs: int, width: int, rank: int, dtype: mx.Dtype, parts: bool
) -> None:
    for found, wanted in ended(inputs, width, rank, dtype, parts=parts):
        assert_close(found, wanted, dtype)


def test_gate_and_up_may_be_wider_than_a_block(metal: pytest.MonkeyPatch) -> None:
    ((found, wanted),) = ended(40, 2056, 8, mx.float32, norms=False)
    assert_close(found, wanted, mx.float32)


END_FAULTS = [
    ("place + OUT", "place"),
    ("h[RANK + r]", "h[r]"),
    ("1.0f + EXP(-opened)", "1.0f + EXP(opened)"),
    ("by_warp[tid / 32] = squares;\n  BARRIER;", "by_warp[tid / 32] = squares;"),
    ("made[c] + static_cast", "static_cast"),
    ("squares += by_warp[w]", "squares = by_warp[w]"),
    ("part * apart", "(part - 1) * apart"),
    ("out[c] += more[c]", "out[c] = more[c]"),
]


@needs_shim
@pytest.mark.parametrize(("old", "new"), END_FAULTS)
def test_a_fault_in_what_follows_lora_is_found(metal: pytest.MonkeyPatch, old: str, new: str) -> None:
    faulty = Faulty(old, new)
    metal.setattr(mx.fast, "metal_kernel", faulty)
    width = 400 + 8 * END_FAULTS.index((old, new))  # a shape of its own: kernels are kept by shape
    with pytest.raises((AssertionError, OutsideError, StuckError)):
        for found, wanted in ended(72, width, 8, mx.float32, parts="more" in old or "part *" in old):
            assert_close(found, wanted, mx.float32)
    assert faulty.found


FAULTS = [
    ("size_t(slot) * IN", "size_t(m) * IN"),
    ("BARRIER;\n  if (tid < R)", "if (tid < R)"),
    ("for (int d = 16;", "for (int d = 8;"),
    ("column < OUT", "column <= OUT"),
]


@needs_shim
@pytest.mark.parametrize(("old", "new"), FAULTS)
def test_a_fault_in_lora_s_kernel_is_found(metal: pytest.MonkeyPatch, old: str, new: str) -> None:
    faulty = Faulty(old, new)
    metal.setattr(mx.fast, "metal_kernel", faulty)
    shape = (72, (40, 24), 16 + 8 * FAULTS.index((old, new)), 3)  # a shape of its own: kernels are kept by shape
    with pytest.raises((AssertionError, OutsideError, StuckError)):
        found, wanted = lora(*shape, mx.float32)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other, mx.float32)
    assert faulty.found


class Case(NamedTuple):
    """Attention of a decode step; keys and values are views of longer arrays, as a batch's cache has them."""

    rows: int
    heads: int
    kv_heads: int
    at_once: int
    positions: int
    size: int
    bits: int
    group_size: int
    dtype: mx.Dtype
    masked: bool = True


ATTENTION = {
    "8 bits, one stretch of many rows": Case(41, 8, 8, 1, 67, 64, 8, 32, mx.float32),
    "4 bits, drafts of unequal rows": Case(2, 6, 2, 3, 301, 128, 4, 64, mx.bfloat16),
    "one row, five that share a head": Case(1, 10, 2, 1, 700, 256, 8, 128, mx.float16, False),
    "4 bits, 64 numbers": Case(3, 2, 2, 1, 130, 64, 4, 64, mx.float32, False),
}


def attended(case: Case) -> tuple[mx.array, mx.array]:
    """By the kernels, and by MLX's operations in fp32."""
    rows, heads, kv_heads, at_once, positions, size, bits, group_size, dtype, masked = case
    packing = Packing(bits, group_size, dtype)
    whole = [packing.pack(normal(seed, rows, kv_heads, positions + 9, size)) for seed in (1, 2)]
    keys, values = (each[..., :positions, :] for each in whole)
    queries = normal(3, rows, at_once, heads, size).astype(dtype).swapaxes(1, 2)
    mask = None
    if masked:
        at = mx.arange(positions)
        ends, begins = positions - at_once + mx.arange(at_once)[:, None], 5 * mx.arange(rows)[:, None, None, None] % 60
        mask = (at <= ends) & (at >= begins)
    plain = [packing.unpack(each, size).astype(mx.float32) for each in (keys, values)]
    wanted = mx.fast.scaled_dot_product_attention(queries.astype(mx.float32), *plain, scale=0.3, mask=mask)
    return attention(queries, keys, values, 0.3, mask, bits, group_size), wanted


@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION)
def test_attention_over_packed_kv_is_what_mlx_computes(metal: pytest.MonkeyPatch, case: Case) -> None:
    assert_close(*attended(case), case.dtype)


@pytest.mark.parametrize(("bits", "size", "dtype"), [(8, 128, mx.bfloat16), (4, 64, mx.float32)])
def test_packing_is_mlx_s(metal: pytest.MonkeyPatch, bits: int, size: int, dtype: mx.Dtype) -> None:
    packing = Packing(bits, 32, dtype)
    keys, values = (normal(seed, 3, 1, 2, size).astype(dtype).swapaxes(1, 2) for seed in (1, 2))
    keys[0, 0] = 0
    values[1, 1] = 1
    for own, plain in zip(pack(keys, values, bits, 32, packing.words(size)), (keys, values), strict=True):
        if dtype == mx.float32 and not HAS_METAL:
            assert mx.array_equal(own, packing.pack(plain)).item()
        else:  # MLX rounds on the way there, on a CPU
            assert_close(packing.unpack(own, size), plain, dtype)


@needs_shim
def test_few_rows_and_many_have_kernels_of_other_names(metal: pytest.MonkeyPatch) -> None:
    for rows in (3, 9):
        lora(16, (8,), 8, rows, mx.float32)
        attended(Case(rows, 1, 1, 1, 260, 64, 8, 32, mx.float32, False))


KV_FAULTS = [
    ("own / at_once) * queries_strides[1]", "own) * queries_strides[1]"),
    ("begin + simd", "simd"),
    ("sum[h] * factor + weight", "sum[h] + weight"),
    ("weights == 0 ? 0 : numbers / weights", "numbers"),
    ("  threadgroup_barrier(mem_flags::mem_threadgroup);\n  float highest", "  float highest"),
]


@needs_shim
@pytest.mark.parametrize(("old", "new"), KV_FAULTS)
def test_a_fault_in_attention_s_kernels_is_found(metal: pytest.MonkeyPatch, old: str, new: str) -> None:
    faulty = Faulty(old, new)
    metal.setattr(mx.fast, "metal_kernel", faulty)
    case = Case(1, 4, 2, 2, 520 + KV_FAULTS.index((old, new)), 64, 8, 32, mx.float32)  # of a shape of its own
    with pytest.raises((AssertionError, OutsideError, StuckError)):
        assert_close(*attended(case), case.dtype)
    assert faulty.found


@needs_shim
def test_a_fault_in_packing_s_kernel_is_found(metal: pytest.MonkeyPatch) -> None:
    faulty = Faulty("LAST = (1 << BITS) - 1", "LAST = (1 << BITS) - 2")
    metal.setattr(mx.fast, "metal_kernel", faulty)
    packing = Packing(8, 64, mx.float32)
    x = normal(1, 1, 1, 1, 64)
    found, _ = pack(x, x, 8, 64, packing.words(64))
    assert faulty.found and not mx.array_equal(found, packing.pack(x)).item()
