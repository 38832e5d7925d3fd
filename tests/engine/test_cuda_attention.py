"""Attention of decode steps on CUDA: as MLX's own, for every shape that it takes; left alone where it has none."""

from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from mlx_model.kv.cuda import attention as cuda_attention
from mlx_model.kv.cuda import few_shapes
from mlx_model.kv.quantised import Packing

ROWS, SCALE = 3, 0.11
needs_cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")


def drawn(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def wanted(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None, sinks: mx.array | None = None
) -> mx.array:
    """By its definition, in fp32."""
    shared_by = queries.shape[1] // keys.shape[1]
    queries, keys, values = (each.astype(mx.float32) for each in (queries, keys, values))
    keys, values = mx.repeat(keys, shared_by, 1), mx.repeat(values, shared_by, 1)
    scores = SCALE * (queries[..., None, :] * keys[:, :, None]).sum(-1)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    if sinks is not None:
        sink = mx.broadcast_to(sinks.astype(mx.float32)[None, :, None, None], (*scores.shape[:3], 1))
        scores = mx.concatenate([scores, sink], -1)
    weights = mx.softmax(scores, -1)[..., : keys.shape[2]]
    return (weights[..., None] * values[:, :, None]).sum(3)


def seen_by(positions: int, queries: int = 1) -> mx.array:
    """The last positions' queries see what is before them, and no padding on the left."""
    at, last = mx.arange(positions)[None, None, None], mx.arange(positions - queries, positions)[None, None, :, None]
    return (at >= mx.array([0, positions // 3, positions - queries])[:, None, None, None]) & (at <= last)


@needs_cuda
def test_plain_kv_of_every_type_and_size() -> None:
    """Few of all combinations: the kernels of each one are compiled anew."""
    for dtype, size, heads, kv_heads, at_once in (
        (mx.bfloat16, 128, 8, 2, 1),
        (mx.bfloat16, 128, 8, 2, 3),
        (mx.bfloat16, 128, 8, 2, 6),
        (mx.bfloat16, 128, 8, 2, cuda_attention.MOST_QUERIES),
        (mx.bfloat16, 64, 14, 2, 1),
        (mx.float16, 64, 2, 2, 1),
        (mx.float16, 64, 6, 2, 5),
        (mx.float16, 256, 8, 4, 1),
        (mx.float32, 256, 6, 2, 1),
        (mx.float32, 256, 2, 2, 2),
        (mx.float32, 128, 4, 4, 1),
    ):
        check_plain(dtype, size, heads, kv_heads, at_once)


def check_plain(dtype: mx.Dtype, size: int, heads: int, kv_heads: int, at_once: int) -> None:
    for positions in (64, 300, 2001):
        queries = drawn(ROWS, at_once, heads, size, dtype=dtype).swapaxes(1, 2)
        keys, values = (drawn(ROWS, kv_heads, 2048, size, dtype=dtype)[..., :positions, :] for _ in range(2))
        sinks = drawn(heads, dtype=dtype)
        masked = (seen_by(positions, at_once), sinks)
        for mask, sink in (masked, (None, None)) if at_once == 1 else (masked,):
            close = wanted(queries, keys, values, mask, sink)
            out = cuda_attention.attention(queries, keys, values, SCALE, mask, sink)
            assert mx.allclose(out.astype(mx.float32), close, atol=2e-2 if dtype != mx.float32 else 1e-5)


@needs_cuda
def test_packed_kv_of_every_number_of_bits() -> None:
    for bits, size, group_size, dtype, kv_heads in (
        (8, 64, 64, mx.bfloat16, 2),
        (8, 128, 64, mx.bfloat16, 8),
        (4, 128, 32, mx.bfloat16, 4),
        (4, 256, 128, mx.float16, 2),
        (8, 128, 32, mx.float32, 2),
    ):
        packing = Packing(bits, group_size, dtype)
        queries = drawn(ROWS, 8, 1, size, dtype=dtype)
        packed = [packing.pack(drawn(ROWS, kv_heads, 1024, size, dtype=dtype))[..., :777, :] for _ in range(2)]
        one = [each[..., 5:6, :] for each in (drawn(ROWS, kv_heads, 9, size, dtype=dtype) for _ in range(2))]
        for told, each in zip(cuda_attention.pack(*one, bits, group_size, packing.words(size)), one, strict=True):
            assert mx.array_equal(told, packing.pack(each))
        mask = seen_by(777)
        keys, values = (packing.unpack(each, size) for each in packed)
        out = cuda_attention.attention(queries, *packed, SCALE, mask, bits=bits, group_size=group_size)
        close = wanted(queries, keys, values, mask)
        assert mx.allclose(out.astype(mx.float32), close, atol=2e-2 if dtype != mx.float32 else 1e-4)


def test_it_takes_only_what_it_is_made_for() -> None:
    queries, keys = mx.zeros((2, 4, 1, 64)), mx.zeros((2, 2, 100, 64))
    seen = mx.ones((2, 1, 1, 100), mx.bool_)
    for mask in (None, "causal", seen):
        assert cuda_attention.is_for(queries, keys, keys, mask)
    assert not cuda_attention.is_for(queries, keys, keys, seen.astype(mx.float32)), "an additive mask"
    assert not cuda_attention.is_for(queries, keys, keys, mx.ones((2, 4, 1, 100), mx.bool_)), "a mask for each head"
    several = mx.zeros((2, 4, cuda_attention.MOST_QUERIES, 64))
    assert cuda_attention.is_for(several, keys, keys, seen), "a draft"
    assert not cuda_attention.is_for(several, keys, keys, "causal"), "a prompt's last piece"
    more = mx.zeros((2, 4, cuda_attention.MOST_QUERIES + 1, 64))
    assert not cuda_attention.is_for(more, keys, keys, seen), "more queries a row"
    assert not cuda_attention.is_for(queries, keys[:, :, :10], keys[:, :, :10], None), "few positions"
    assert not cuda_attention.is_for(queries, keys, mx.zeros((2, 2, 100, 32)), None), "values of another size"
    assert not cuda_attention.is_for(
        mx.zeros((2, 4, 1, 80)), mx.zeros((2, 2, 100, 80)), mx.zeros((2, 2, 100, 80)), None
    )
    packed = mx.zeros((2, 2, 100, 17), mx.uint32)
    assert cuda_attention.is_for(queries, packed, packed, seen, bits=8)
    assert not cuda_attention.is_for(queries, packed, packed, seen)


@pytest.mark.skipif(mx.cuda.is_available(), reason="of a machine without CUDA")
def test_without_cuda_mlxs_attention_stays() -> None:
    before = mx.fast.scaled_dot_product_attention
    assert not cuda_attention.install()
    assert mx.fast.scaled_dot_product_attention is before


@pytest.mark.parametrize("rows, past", [(1, 0), (3, 0), (3, 41), (5, 500)])
def test_a_prompt_in_a_shape_of_few_is_what_it_is_in_its_own(rows: int, past: int) -> None:
    at_once, heads, size = 21, 4, 16
    positions = past + at_once
    queries, keys, values = (
        drawn(rows, count, each, size, dtype=mx.float16).swapaxes(1, 2)
        for count, each in ((at_once, heads), (positions, 2), (positions, 2))
    )
    at, own = mx.arange(positions)[None], mx.arange(past, positions)[:, None]
    begins = mx.arange(rows)[:, None, None, None] * (past > 0)  # what sees nothing is nothing in particular
    fused, seen = mx.fast.scaled_dot_product_attention, []

    def kept(*given: mx.array, **others: Any) -> mx.array:
        seen.append(tuple(each.shape for each in given))
        return fused(*given, **others)

    for mask in ("causal", at <= own, (at <= own) & (at >= begins), (at >= begins)[:, :, :1]):
        for sinks in (None, drawn(heads, dtype=mx.float16)):
            assert not few_shapes.is_for(queries, keys, values, mask), "a trainer's"
            with few_shapes.applied():
                assert few_shapes.is_for(queries, keys, values, mask)

            def out(call: Any, keys: mx.array, mask: Any = mask, sinks: Any = sinks) -> mx.array:
                return call(queries, keys, values, mask=mask, scale=SCALE, sinks=sinks).astype(mx.float32)

            one, other = out(fused, keys), out(partial(few_shapes.in_few_shapes, kept), keys)
            assert one.shape == other.shape and mx.allclose(one, other, atol=2e-3)
            learned = [
                mx.grad(lambda keys, call=call: out(call, keys).sum())(keys)
                for call in (fused, partial(few_shapes.in_few_shapes, fused))
            ]
            assert mx.allclose(*learned, atol=2e-3), "what nobody reads adds nothing to a gradient, NaN least of all"
    assert {(shapes[0][0], shapes[0][2]) for shapes in seen} == {(few_shapes.rows_for(rows), 32)}


def test_prompts_of_all_lengths_have_few_shapes() -> None:
    sizes = {few_shapes.size_for(count) for count in range(1, 4097)}
    assert len(sizes) == 19 and all(few_shapes.size_for(size) == size for size in sizes)
    assert all(count <= few_shapes.size_for(count) <= max(16, 2 * count) for count in range(1, 20_000))
    assert all(few_shapes.size_for(count) <= 1.25 * count for count in range(1025, 20_000))
    assert {few_shapes.rows_for(count) for count in range(1, 33)} == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32}
