"""Draws of rows without filters on CUDA: one kernel that reads the logits once (`drawn.cu`).

MLX's operations go over them some ten times, in float32: 0.5 ms for 192 places of 150,000 tokens, which is a tenth of a
step of a small model that checks drafts. A token is found as `sampling/draw.py` finds it, by inverse CDF in the
order of ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from pathlib import Path

import mlx.core as mx

from mlx_model.cuda import is_on, is_right, kernel

SWITCH = "PARALLM_CUDA_DRAWS"  # 0: MLX's own
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
_THREADS = 1024
_SOURCE = Path(__file__).with_name("drawn.cu")


def are_there() -> bool:
    """True if this process draws by the kernel."""
    return is_on(SWITCH) and is_right("sampling.draws", SWITCH, _trials)


def _trials() -> Iterator[tuple[str, bool]]:
    """Every token of equal chances, and of few that have any."""
    for vocab in (1000, 1001):
        uniforms_N1 = (mx.arange(vocab).reshape(-1, 1) + 0.5) / vocab
        tokens_N, logprobs_N = drawn(mx.zeros((vocab, vocab), mx.bfloat16), uniforms_N1, None)
        yield f"vocab={vocab}", bool(mx.array_equal(tokens_N, mx.arange(vocab)))
        yield f"logprobs vocab={vocab}", bool(mx.allclose(logprobs_N, mx.array(-log(vocab))))
        some_1V = mx.where(mx.arange(vocab) % 333 == 1, 2.0, -mx.inf)[None]  # tokens 1, 334 and 667 (and 1000)
        few = len(range(1, vocab, 333))
        likely_N1 = (mx.arange(few).reshape(-1, 1) + 0.5) / few
        tokens_N, _ = drawn(mx.repeat(some_1V, few, 0), likely_N1, mx.full((few, 1), 0.5))
        yield f"few vocab={vocab}", bool(mx.array_equal(tokens_N, 1 + 333 * mx.arange(few)))


def is_for(logits_NV: mx.array) -> bool:
    """True if the kernel supports this dtype."""
    return logits_NV.dtype in _DTYPES


def drawn(
    logits_NV: mx.array, uniforms_N1: mx.array, inverse_temperature_N1: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Token ids [N] uint32 of tempered logits, and their log-probabilities [N] float32 without a temperature."""
    count, vocab = logits_NV.shape
    inputs = {"logits": logits_NV, "uniforms": uniforms_N1}
    headers: tuple[str, ...] = ()
    if inverse_temperature_N1 is not None:
        inputs["inverse"], headers = inverse_temperature_N1, ("#define TEMPERED",)
    per = 16 // logits_NV.dtype.size
    tokens_N, logprobs_N = kernel(_SOURCE, tuple(inputs), ("tokens", "logprobs"), headers)(
        inputs=list(inputs.values()),
        template=[("T", logits_NV.dtype), ("PER", 1 if vocab % per else per)],
        grid=(count * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(count,), (count,)],
        output_dtypes=[mx.uint32, mx.float32],
    )
    return tokens_N, logprobs_N
