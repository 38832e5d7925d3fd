"""Drawing tokens: plain functions on arrays, one row per sequence.

A row's draw depends on its own scores, seed and position only: thresholds are values of its own distribution and the
token is found by inverse CDF in the order of token ids, so a row gets the same token in any batch.
"""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from shared.frames import TokenLogprob

_MASK_64 = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix_seeds(seeds: list[int]) -> npt.NDArray[np.uint64]:
    """Seeds [B] of any size as well mixed 64-bit numbers; once per change of the batch."""
    return _mix(np.array([seed & _MASK_64 for seed in seeds], np.uint64) + _GOLDEN)


def uniforms(mixed_seeds_B: npt.NDArray[np.uint64], positions_B: npt.NDArray[np.int64]) -> mx.array:
    """One number in [0, 1 - 2^-24] per row from (seed, position): splitmix64 (doi 10.1145/2714064.2660195); [B, 1]."""
    bits_B = _mix(mixed_seeds_B + (positions_B.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    uniforms_B = (bits_B >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    return mx.array(uniforms_B[:, None])


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def nucleus_threshold(
    scores_FV: mx.array, mass_F1: mx.array, top_k_F1: mx.array, top_p_F1: mx.array, candidates: int
) -> tuple[mx.array, mx.array]:
    """The smallest score that top_k and then top_p keep, [F, 1]; and whether `candidates` sufficed, [F, 1] bool.

    `mass_F1` is sum(exp(scores - max)) over the vocabulary. top_p applies to the distribution that top_k leaves
    (vLLM's order): the fewest tokens whose mass reaches top_p. top_k is the vocabulary's size, top_p 2, where off.
    Ties with the threshold are kept.
    """
    vocab = scores_FV.shape[-1]
    count = min(candidates, vocab)
    top_FK = scores_FV if count == vocab else mx.topk(scores_FV, count, axis=-1)
    top_FK = mx.sort(top_FK, axis=-1)[:, ::-1]
    weights_FK = mx.exp(top_FK - top_FK[:, :1])
    in_top_k_FK = mx.arange(count)[None] < top_k_F1
    mass_F1 = mx.where(top_k_F1 < vocab, mx.sum(mx.where(in_top_k_FK, weights_FK, 0), -1, keepdims=True), mass_F1)
    cumulative_FK = mx.cumsum(weights_FK, axis=-1)
    goal_F1 = top_p_F1 * mass_F1
    kept_FK = in_top_k_FK & (cumulative_FK - weights_FK < goal_F1)
    last_F1 = mx.maximum(mx.sum(kept_FK, axis=-1, keepdims=True), 1) - 1
    reaches_top_p_F1 = (top_k_F1 >= vocab) & (cumulative_FK[:, -1:] >= goal_F1)
    enough_F1 = (top_k_F1 <= count) | reaches_top_p_F1 | (count == vocab)
    return mx.take_along_axis(top_FK, last_F1, axis=-1), enough_F1


def draw_by_weight(weights_SV: mx.array, uniforms_S1: mx.array, fallback_S: mx.array) -> mx.array:
    """Token ids [S], each drawn in proportion to its weight (zero: never); `fallback_S` if rounding finds none."""
    cumulative_SV = mx.cumsum(weights_SV, axis=-1)
    beyond_SV = (cumulative_SV > uniforms_S1 * cumulative_SV[:, -1:]) & (weights_SV > 0)
    tokens_S1 = mx.argmax(beyond_SV, axis=-1, keepdims=True)
    found_S1 = mx.take_along_axis(beyond_SV, tokens_S1, axis=-1)
    return mx.where(found_S1[:, 0], tokens_S1[:, 0], fallback_S)


def top_lists(ids_TK: mx.array, values_TK: mx.array) -> list[list[TokenLogprob]]:
    """The result of `most_likely` on the host."""
    ids, values = cast(list[list[int]], ids_TK.tolist()), cast(list[list[float]], values_TK.tolist())
    return [
        [TokenLogprob(token, value) for token, value in zip(*row, strict=True)] for row in zip(ids, values, strict=True)
    ]


def most_likely(logprobs_TV: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` most likely tokens, best first: ids [T, count] and log-probabilities [T, count]."""
    ids_TK = mx.argpartition(-logprobs_TV, kth=count - 1, axis=-1)[..., :count]
    values_TK = mx.take_along_axis(logprobs_TV, ids_TK, axis=-1)
    order_TK = mx.argsort(-values_TK, axis=-1)
    return mx.take_along_axis(ids_TK, order_TK, axis=-1), mx.take_along_axis(values_TK, order_TK, axis=-1)
