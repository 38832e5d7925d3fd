"""Drawing tokens: plain functions on arrays, one row per sequence.

A row's draw depends on its own scores, seed and position only: thresholds are values of its own distribution and the
token is found by inverse CDF in the order of token ids, so a row gets the same token in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_model.cuda import fused
from mlx_model.sampling.named_tokens import NamedLogprobs
from shared import noise
from shared.frames import TokenLogprob, TokenLogprobs

BLOCK = 32  # tokens whose largest chance stands for them
SMALLEST = 1e-37  # a chance below this counts as none


def uniforms(mixed_seeds_B: npt.NDArray[np.uint64], positions_B: npt.NDArray[np.int64]) -> mx.array:
    """The numbers of `shared.noise.uniforms`, [B, 1]."""
    return mx.array(noise.uniforms(mixed_seeds_B, positions_B)[:, None])


def uniforms_at(mixed_seeds: mx.array, positions: mx.array) -> mx.array:
    """The same for positions that only the device knows; both uint64, of shapes that broadcast."""
    return _uniforms_at(mixed_seeds, positions, *_numbers())


@fused
def _uniforms_at(mixed: mx.array, positions: mx.array, golden: mx.array, first: mx.array, second: mx.array) -> mx.array:
    bits: mx.array = noise.mix(mixed + (positions + 1) * golden, first, second)
    return (bits >> 40).astype(mx.float32) * 2**-24


@cache
def _numbers() -> list[mx.array]:
    """As arrays: a compiler would take them for numbers with a sign."""
    numbers = [mx.array(np.array(each)) for each in (noise.GOLDEN, *noise.FACTORS)]
    mx.eval(numbers)
    return numbers


def largest_by_blocks(chances_FV: mx.array, count: int) -> mx.array:
    """The `count` largest chances of each row [F, count], largest first; none is negative.

    For devices whose partition is a sort of all. The largest chances lie in those blocks whose own largest ones are the
    `count` largest of all blocks: of 151,936 tokens and 256 candidates this sorts 4,748 numbers and then 8,192.
    """
    rows, vocab = chances_FV.shape
    blocks_FNB = mx.pad(chances_FV, [(0, 0), (0, -vocab % BLOCK)]).reshape(rows, -1, BLOCK)
    at_FC = mx.argpartition(-mx.max(blocks_FNB, axis=-1), kth=count - 1, axis=-1)[:, :count]
    those_FK = mx.take_along_axis(blocks_FNB, at_FC[..., None], axis=1).reshape(rows, -1)
    return mx.sort(those_FK, axis=-1)[:, ::-1][:, :count]


def nucleus_threshold(
    chances_FV: mx.array,
    top_k_F1: mx.array | None,
    top_p_F1: mx.array | None,
    candidates: int,
    *,
    by_blocks: bool = False,
) -> tuple[mx.array, mx.array | None]:
    """The smallest chance that top_k and then top_p keep, [F, 1]; and whether `candidates` sufficed, [F, 1] bool.

    `chances_FV` sum to 1. top_p applies to the distribution that top_k leaves (vLLM's order): the fewest tokens whose
    mass reaches top_p. Ties with the threshold are kept. A row without top_k has the vocabulary's size there, a
    row without top_p has 2; None: no row has it. The second result is None where it is certain. `by_blocks`: how the
    candidates are found.
    """
    vocab = chances_FV.shape[-1]
    count = min(candidates, vocab)
    if by_blocks and count * BLOCK < vocab:
        top_FK = largest_by_blocks(chances_FV, count)
    else:
        top_FK = chances_FV if count == vocab else mx.topk(chances_FV, count, axis=-1)
        top_FK = mx.sort(top_FK, axis=-1)[:, ::-1]
    if top_p_F1 is None:
        assert top_k_F1 is not None, "top_k or top_p"
        enough_F1 = None if count == vocab else top_k_F1 <= count
        return mx.take_along_axis(top_FK, mx.minimum(top_k_F1, count) - 1, axis=-1), enough_F1
    cumulative_FK = mx.cumsum(top_FK, axis=-1)
    goal_F1, enough_F1 = top_p_F1, cumulative_FK[:, -1:] >= top_p_F1
    if top_k_F1 is not None:
        mass_F1 = mx.take_along_axis(cumulative_FK, mx.minimum(top_k_F1, count) - 1, axis=-1)
        goal_F1 = mx.where(top_k_F1 < vocab, top_p_F1 * mass_F1, top_p_F1)
        enough_F1 = mx.where(top_k_F1 < vocab, top_k_F1 <= count, enough_F1)
    kept_F1 = mx.sum(cumulative_FK - top_FK < goal_F1, axis=-1, keepdims=True)
    if top_k_F1 is not None:
        kept_F1 = mx.minimum(kept_F1, top_k_F1)
    return mx.take_along_axis(top_FK, kept_F1 - 1, axis=-1), None if count == vocab else enough_F1


HALVINGS = 30  # of the bits of float32 from 0 to 1, about 2^30 numbers


def nucleus_by_halving(chances_FV: mx.array, top_k_F1: mx.array | None, top_p_F1: mx.array | None) -> mx.array:
    """The threshold of `nucleus_threshold` among all tokens, without a sort, [F, 1].

    A chance is kept by top_p if all larger ones together weigh less than the goal, and by top_k if they are fewer than
    k. Positive floats are in the order of their bits, so the smallest such bits are found by halving their range: each
    halving is one sum over the tokens.
    """
    found_F1 = mx.zeros((chances_FV.shape[0], 1))
    goal_F1 = top_p_F1
    if top_k_F1 is not None:
        found_F1 = _smallest(chances_FV, partial(_are_fewer, top_k_F1))
        if top_p_F1 is not None:  # of the k largest, of which some may tie with others
            larger_FV = chances_FV > found_F1
            mass_F1, count_F1 = (
                mx.sum(each, axis=-1, keepdims=True) for each in (mx.where(larger_FV, chances_FV, 0), larger_FV)
            )
            mass_F1 = mass_F1 + (top_k_F1 - count_F1) * found_F1
            goal_F1 = mx.where(top_k_F1 < chances_FV.shape[-1], top_p_F1 * mass_F1, top_p_F1)
    if goal_F1 is not None:
        found_F1 = mx.maximum(found_F1, _smallest(chances_FV, partial(_weigh_less, goal_F1, chances_FV)))
    return found_F1


def _smallest(chances_FV: mx.array, keeps: Callable[[mx.array], mx.array]) -> mx.array:
    """The smallest chance that is kept, by what is true of all larger ones [F, V] bool."""
    bits_FV = mx.view(chances_FV, mx.int32)
    high_F1 = mx.max(bits_FV, axis=-1, keepdims=True)
    low_F1 = mx.zeros_like(high_F1)
    for _ in range(HALVINGS):
        middle_F1 = (low_F1 + high_F1) // 2
        is_kept_F1 = keeps(bits_FV > middle_F1)
        low_F1, high_F1 = mx.where(is_kept_F1, low_F1, middle_F1 + 1), mx.where(is_kept_F1, middle_F1, high_F1)
    return mx.view(high_F1, mx.float32)


def _are_fewer(top_k_F1: mx.array, larger_FV: mx.array) -> mx.array:
    return mx.sum(larger_FV, axis=-1, keepdims=True) < top_k_F1


def _weigh_less(goal_F1: mx.array, chances_FV: mx.array, larger_FV: mx.array) -> mx.array:
    return mx.sum(mx.where(larger_FV, chances_FV, 0), axis=-1, keepdims=True) < goal_F1


@fused
def draw_by_chance(chances_SV: mx.array, smallest_S1: mx.array, uniforms_S1: mx.array) -> mx.array:
    """Token ids [S] uint32: each in proportion to its chance, among those of at least `smallest_S1` > 0."""
    kept_SV = chances_SV >= smallest_S1
    return _drawn(kept_SV, mx.cumsum(mx.where(kept_SV, chances_SV, 0), axis=-1), uniforms_S1)


@fused
def draw_of_all(chances_SV: mx.array, uniforms_S1: mx.array) -> mx.array:
    """The same of all tokens that have a chance: chances of none at all are too small to move a sum."""
    return _drawn(chances_SV >= SMALLEST, mx.cumsum(chances_SV, axis=-1), uniforms_S1)


def _drawn(kept_SV: mx.array, cumulative_SV: mx.array, uniforms_S1: mx.array) -> mx.array:
    """Excluded tokens are masked again: a parallel scan rounds so that its sum may creep up on one of weight 0."""
    cumulative_SV = mx.where(kept_SV, cumulative_SV, 0)
    return mx.argmax(cumulative_SV > uniforms_S1 * mx.max(cumulative_SV, axis=-1, keepdims=True), axis=-1)


def top_lists(ids_TK: mx.array, values_TK: mx.array) -> list[TokenLogprobs]:
    """The result of `most_likely` on the host."""
    ids, values = cast(list[list[int]], ids_TK.tolist()), cast(list[list[float]], values_TK.tolist())
    return [
        tuple([TokenLogprob(token, value) for token, value in zip(*row, strict=True)])
        for row in zip(ids, values, strict=True)
    ]


def most_likely(logprobs_TV: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` most likely tokens, best first: ids [T, count] and log-probabilities [T, count]."""
    ids_TK = mx.argpartition(-logprobs_TV, kth=count - 1, axis=-1)[..., :count]
    values_TK = mx.take_along_axis(logprobs_TV, ids_TK, axis=-1)
    order_TK = mx.argsort(-values_TK, axis=-1)
    return mx.take_along_axis(ids_TK, order_TK, axis=-1), mx.take_along_axis(values_TK, order_TK, axis=-1)


class Draw:
    """Results of one decode step other than its tokens; copied to the host when first read."""

    __slots__ = ("_arrays", "_asked", "_logprobs", "_routes", "_top", "_top_index", "routes_BW", "versions")

    def __init__(
        self,
        versions: tuple[str, ...],
        logprobs_B: mx.array,
        top_TK: tuple[mx.array, mx.array] | None,
        top_index: dict[int, int],
        asked: NamedLogprobs,
    ) -> None:
        self.versions = versions  # adapter version of each row at dispatch
        self._arrays = (logprobs_B, top_TK)
        self._logprobs: list[float] | None = None
        self._top: tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]] | None = None
        self._top_index = top_index  # row of the batch -> row of the top arrays
        self._asked = asked
        self.routes_BW: mx.array | None = None  # experts that each row was computed with, where a row asks for them
        self._routes: npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays on the device that are still to be evaluated."""
        logprobs_B, top_TK = self._arrays
        routes = () if self.routes_BW is None else (self.routes_BW,)
        return [logprobs_B, *(top_TK or ()), *self._asked.arrays, *routes]

    def logprob(self, index: int) -> float:
        """Log-probability of the token drawn for row `index`."""
        if self._logprobs is None:
            self._logprobs = cast(list[float], self._arrays[0].tolist())
        return self._logprobs[index]

    def routes(self, index: int) -> bytes:
        """Experts that row `index` was computed with (mlx_model/routing.py)."""
        if self._routes is None:
            assert self.routes_BW is not None, "no row has asked for routes"
            self._routes = np.array(self.routes_BW)
        return bytes(self._routes[index].tobytes())

    def top_logprobs(self, index: int, count: int) -> TokenLogprobs:
        """The `count` most likely tokens of row `index`, best first; or those that it names itself."""
        if (named := self._asked.of(index)) is not None:
            return named
        top_TK = self._arrays[1]
        if count == 0 or top_TK is None:
            return ()
        if self._top is None:
            self._top = np.array(top_TK[0]), np.array(top_TK[1])
        at = self._top_index[index]  # only its own part: another row may have asked for the whole vocabulary
        ids, values = (part[at, :count].tolist() for part in self._top)
        return tuple([TokenLogprob(token, value) for token, value in zip(ids, values, strict=True)])
