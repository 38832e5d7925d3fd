"""Kernels of a decode step on CUDA say what MLX's operations say; without CUDA these stay."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import Llama3RoPE, YarnRoPE

from mlx_model.cuda import is_right
from mlx_model.lora.deltas import deltas_of
from mlx_model.lora.kernels import may_end, norms, one_pass, one_pass_joined
from mlx_model.step.cuda import products
from mlx_model.step.cuda.rotary import Rotary
from mlx_model.step.decode_step import DecodeStep, join_products
from tests.engine.ended_layers import ended
from tests.engine.test_decode_step import MODELS, decoded, load

needs_cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")
needs_hopper = pytest.mark.skipif(
    not mx.cuda.is_available() or mx.device_info().get("architecture") != products.HOPPER, reason="needs a Hopper"
)
TYPES = (mx.bfloat16, mx.float16)


def drawn(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def is_close(one: mx.array, other: mx.array, rtol: float = 2e-2) -> bool:
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    return bool(mx.abs(one - other).max() <= rtol * mx.abs(other).max())


def assert_right(rows: int, outputs: int, inputs: int, dtype: mx.Dtype, *, is_gated: bool = False) -> None:
    x, weight = drawn(rows, inputs, dtype=dtype), (drawn(outputs, inputs) / inputs**0.5).astype(dtype)
    assert products.is_for(x, weight)
    wanted = x.astype(mx.float32) @ weight.astype(mx.float32).T
    if is_gated:
        assert is_close(products.gated(x, weight), swiglu(*mx.split(wanted, 2, axis=-1)), 5e-2)
    else:
        assert is_close(products.product(x, weight), wanted)


@needs_cuda
@pytest.mark.parametrize("dtype", TYPES)
def test_products_of_few_rows(dtype: mx.Dtype) -> None:
    """Outputs that fill no block, inputs that fill no round of the warps."""
    for rows, outputs, inputs in (
        (2, 4096, 4096),
        (2, 100, 64),
        (8, 33, 96),
        (9, 4096, 128),
        (17, 48, 4096),
        (32, 64, 32),
    ):
        assert_right(rows, outputs, inputs, dtype)
    for rows, outputs, inputs in ((2, 64, 64), (5, 8, 32), (32, 1000, 256)):
        assert_right(rows, outputs, inputs, dtype, is_gated=True)


@needs_hopper
@pytest.mark.parametrize("dtype", TYPES)
def test_products_of_more_rows(dtype: mx.Dtype) -> None:
    """By blocks of all widths, of one warpgroup to four, and as sums of stretches of the inputs or as a whole."""
    blocks = set()
    for rows, outputs, inputs in (
        (33, 100, 64),
        (75, 4096, 1024),
        (192, 101, 128),
        (64, 1024, 2048),
        (129, 2560, 9728),
        (256, 6144, 2560),
        (250, 9720, 2560),
    ):
        assert_right(rows, outputs, inputs, dtype)
        blocks.add(products.blocks_of_many(outputs, inputs, is_gated=False))
    for rows, outputs, inputs in ((48, 1000, 256), (90, 66, 64), (256, 6144, 1024), (256, 19456, 2560)):
        assert_right(rows, outputs, inputs, dtype, is_gated=True)
        blocks.add(products.blocks_of_many(outputs, inputs, is_gated=True))
    assert {width for width, _ in blocks} == {64, 96, 160} and len({splits for _, splits in blocks}) > 2


@needs_cuda
@pytest.mark.parametrize("rows", [3, 32, pytest.param(200, marks=needs_hopper)])
def test_what_lies_behind_a_product_is_what_separate_operations_make(rows: int) -> None:
    """Of parts, and of a product that was made as a whole."""
    for outputs, inputs in ((1024, 2048), (2560, 9728), (8192, 64), (136, 4096)):
        x, weight = drawn(rows, inputs), (drawn(outputs, inputs) / inputs**0.5).astype(mx.bfloat16)
        fed, norm = drawn(rows, outputs), drawn(outputs)
        assert products.adds_and_norms(fed, norm)
        made = products.product(x, weight)
        wanted = fed + made
        for each in (products.parts(x, weight), made):
            added, normed = products.added_and_normed(each, fed, norm, 1e-6)
            assert mx.array_equal(added, wanted)
            assert is_close(normed, mx.fast.rms_norm(wanted, norm, 1e-6), 1e-2)
    assert not products.adds_and_norms(fed[:, :-2], norm[:-2]), "no whole vectors"
    assert not products.adds_and_norms(fed.astype(mx.float32), norm), "two types"


@needs_cuda
@pytest.mark.parametrize(
    "all_rows, fewer", [(32, (2, 7, 8, 12, 31)), pytest.param(256, (33, 48, 100, 192), marks=needs_hopper)]
)
def test_a_row_has_the_same_sums_among_others(all_rows: int, fewer: tuple[int, ...]) -> None:
    x, weight = drawn(all_rows, 4096), drawn(256, 4096)
    whole = products.product(x, weight)
    for rows in fewer:
        assert mx.array_equal(products.product(x[:rows], weight), whole[:rows])


def test_what_the_kernel_is_not_made_for() -> None:
    assert not products.is_for(drawn(257, 64), drawn(64, 64)), "many rows"
    assert products.is_for(drawn(32, 64), drawn(64, 64))
    assert not products.is_for(drawn(1, 64), drawn(64, 64)), "one"
    assert not products.is_for(drawn(2, 48), drawn(64, 48)), "no whole steps"
    assert not products.is_for(drawn(2, 64), drawn(64, 64, dtype=mx.float16)), "two types"
    assert not products.is_for(drawn(2, 64, dtype=mx.float32), drawn(64, 64, dtype=mx.float32))


@needs_hopper
def test_more_than_a_few_rows_by_weights_that_are_large_stay_with_mlx() -> None:
    weight = mx.zeros((products.LARGEST // 128 // 2, 128), mx.bfloat16)
    assert products.is_for(drawn(33, 128), weight)
    assert not products.is_for(drawn(33, 128), mx.zeros((weight.shape[0] + 1, 128), mx.bfloat16))


@needs_cuda
@pytest.mark.parametrize("dtype", (*TYPES, mx.float32))
@pytest.mark.parametrize("normed", [True, False])
def test_queries_and_keys_are_turned_as_mlx_turns_them(dtype: mx.Dtype, normed: bool) -> None:
    config = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    for rope, size, heads in (
        (nn.RoPE(128, base=1e6), 128, (16, 4, 4)),
        (nn.RoPE(64, base=1e4, scale=0.5), 64, (3, 1, 1)),
        (nn.RoPE(80), 80, (2, 2, 2)),
        (Llama3RoPE(64, 4096, False, 5e5, config), 64, (8, 2, 2)),
    ):
        rotary = Rotary.of(rope, size)
        assert rotary is not None
        qkv, offset = drawn(3, sum(heads) * size, dtype=dtype), mx.array([0, 7, 1900])
        norms = [drawn(size, dtype=dtype) for _ in range(2)] if normed else []
        assert rotary.takes(qkv, norms, offset)
        several = mx.concatenate([qkv[:, None], drawn(3, 2, qkv.shape[1], dtype=dtype)], axis=1)
        turned = rotary(several.reshape(9, -1), heads, norms, 1e-6, offset)
        for later in range(3):
            alone = rotary(several[:, later], heads, norms, 1e-6, offset + later)
            for one, other in zip(turned, alone, strict=True):
                assert mx.array_equal(one[:, :, later], other[:, :, 0]), "several tokens of a row stand side by side"
        made = rotary(qkv, heads, norms, 1e-6, offset)
        ends = [heads[0] * size, (heads[0] + heads[1]) * size]
        apart = [each.reshape(3, -1, 1, size) for each in mx.split(qkv, ends, axis=-1)]
        for at, norm in enumerate(norms):
            apart[at] = mx.fast.rms_norm(apart[at], norm, 1e-6)
        wanted = [rope(apart[0], offset=offset), rope(apart[1], offset=offset), apart[2]]
        for one, other in zip(made, wanted, strict=True):
            assert one.shape == other.shape and one.dtype == dtype
            assert is_close(one, other, 1e-5 if dtype == mx.float32 else 1e-2)


@needs_cuda
@pytest.mark.parametrize("dtype", (*TYPES, mx.float32))
def test_deltas_of_outputs_apart_and_side_by_side(dtype: mx.Dtype) -> None:
    """Of several rows, some of the base; widths that fill no block, and more than one."""
    for inputs, widths, places, rank, rows in (
        (4096, (4096, 1024, 1024), (0, 2), 16, 9),
        (96, (40, 8, 24), (0, 1, 2), 8, 4),
        (64, (2048, 2056), (1,), 64, 1),
    ):
        x, y = drawn(rows, inputs, dtype=dtype), drawn(rows, sum(widths), dtype=dtype)
        a = (drawn(3, inputs, rank * len(places)) / inputs**0.5).astype(dtype)
        a[0] = 0  # the base
        bs = [drawn(3, rank, widths[at], dtype=dtype) for at in places]
        slots = mx.array([at % 3 for at in range(1, rows + 1)], mx.uint32)
        ys = mx.split(y, [sum(widths[: at + 1]) for at in range(len(widths) - 1)], axis=-1)
        exact = [x[:, None].astype(mx.float32), a.astype(mx.float32), [b.astype(mx.float32) for b in bs]]
        wanted = [each.astype(mx.float32) for each in ys]
        for at, each in zip(places, deltas_of(*exact, slots, "take"), strict=True):
            wanted[at] = wanted[at] + each[:, 0]
        apart = one_pass(x, a, bs, [ys[at] for at in places], slots)
        for at, each in zip(places, apart, strict=True):
            assert is_close(each, wanted[at])
            ys[at] = each
        whole = one_pass_joined(x, a, bs, y, slots, widths, places)
        assert mx.array_equal(whole, mx.concatenate(ys, axis=-1)), "the same, and what lies between as it was"
        parts = mx.stack([y.astype(mx.float32) / 4, y.astype(mx.float32) * 3 / 4])
        assert is_close(one_pass_joined(x, a, bs, parts, slots, widths, places), whole)


@needs_cuda
@pytest.mark.parametrize("dtype", (*TYPES, mx.float32))
@pytest.mark.parametrize(("inputs", "width", "rank"), [(256, 4096, 64), (96, 136, 8), (64, 4104, 128)])
def test_what_follows_deltas_in_a_layer(inputs: int, width: int, rank: int, dtype: mx.Dtype) -> None:
    """SwiGLU, of a width of more than one block, too; and the residual with the next norm."""
    assert may_end(), "the worker's own trials"
    for parts in (False, True):
        for found, wanted in ended(inputs, width, rank, dtype, parts=parts, norms=norms(width)):
            assert is_close(found, wanted, 5e-2)


@needs_cuda
@pytest.mark.parametrize("name", ["llama", "qwen3"])  # with biases and without
def test_a_decode_step_of_sixteen_bits_says_what_mlx_lm_says(name: str, tmp_path: Path) -> None:
    """Compiled, of products that are joined."""
    model = load(tmp_path, MODELS[name][0] | {"tie_word_embeddings": False})
    model.set_dtype(mx.bfloat16)
    wanted = decoded(model, lambda tokens, caches: model(tokens, cache=caches))
    join_products(model)
    for one, other in zip(decoded(model, DecodeStep(model, compiles=True)), wanted, strict=True):
        assert is_close(one, other, 5e-2)


@needs_cuda
def test_other_positions_stay_with_mlx() -> None:
    others: list[Any] = [nn.RoPE(64, traditional=True), nn.RoPE(32), YarnRoPE(64)]
    assert [Rotary.of(rope, 64) for rope in others] == [None] * 3


def test_without_cuda_none_of_them_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(products.SWITCH, "0")
    assert not products.are_there()
    assert Rotary.of(nn.RoPE(64), 64) is None


def test_why_mlx_computes_in_a_kernel_s_place_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def failing() -> Iterator[tuple[str, bool]]:
        yield "rows=2", True
        raise RuntimeError("no compiler")

    assert is_right("a.kernel", "SWITCH", lambda: [("rows=2", True), ("rows=3", True)]) and not caplog.messages
    assert not is_right("a.kernel", "SWITCH", lambda: [("rows=2", True), ("rows=3", False)])
    assert not is_right("a.kernel", "SWITCH", failing)
    assert caplog.messages == [
        "a.kernel_wrong rows=3: MLX computes them",
        "a.kernel_fail error=no compiler: MLX computes them (SWITCH=0 says so at once)",
    ]
