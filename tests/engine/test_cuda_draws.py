"""Draws in one kernel on CUDA, against MLX's operations."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_model.sampling.cuda import draws
from mlx_model.sampling.draw import draw_of_all

NEAR = 1e-5  # of all chances: where sums that are made in another order may part

pytestmark = pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize(("vocab", "tempered"), [(7, False), (1003, True), (32_000, False), (151_936, True)])
def test_tokens_and_logprobs_are_those_of_mlx(dtype: mx.Dtype, vocab: int, *, tempered: bool) -> None:
    assert draws.are_there(), "the kernel"
    mx.random.seed(vocab)
    count = 192
    logits = (4 * mx.random.normal((count, vocab))).astype(dtype)
    logits[3, : vocab // 2] = -mx.inf
    inverse = mx.random.uniform(0.3, 3.0, (count, 1)) if tempered else None
    uniforms = mx.random.uniform(shape=(count, 1))
    uniforms[:2] = mx.array([[0.0], [1 - 2**-24]])
    tokens, logprobs = draws.drawn(logits, uniforms, inverse)

    wide = logits.astype(mx.float32)
    chances = mx.softmax(wide if inverse is None else wide * inverse, axis=-1)
    expected = np.array(draw_of_all(chances, uniforms))
    exact = np.array(wide - mx.logsumexp(wide, axis=-1, keepdims=True))[np.arange(count), np.array(tokens)]
    assert np.abs(np.array(logprobs) - exact).max() < 2e-5
    ends = np.cumsum(np.array(chances, np.float64), axis=-1)
    shares = np.array(uniforms, np.float64)[:, 0] * ends[:, -1]
    for row, (token, other) in enumerate(zip(np.array(tokens).tolist(), expected.tolist(), strict=True)):
        assert chances[row, token].item() > 0
        low, high = (ends[row, token - 1] if token else 0.0), ends[row, token]
        assert token == other or low - NEAR <= shares[row] <= high + NEAR, (row, token, other)


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = mx.random.normal((64, 50_000)).astype(mx.bfloat16)
    uniforms = mx.random.uniform(shape=(64, 1))
    together, _ = draws.drawn(logits, uniforms, None)
    alone = [draws.drawn(logits[at : at + 1], uniforms[at : at + 1], None)[0].item() for at in range(64)]
    assert together.tolist() == alone
