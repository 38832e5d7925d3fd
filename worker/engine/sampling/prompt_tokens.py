"""Other tokens in the places of a prompt's own: those that its reader names, and some that are drawn.

Place n is that of the prompt's token n + 1, of which the logits behind token n speak. A draw depends on the row's seed,
on its place and on the place's own distribution, whatever pieces the prompt is fed in. Shape suffixes: L places, V
vocabulary, N tokens named in all of them.
"""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import numpy as np

from shared.frames import TokenLogprob
from shared.sequences import LEAST_TEMPERATURE, SamplingParams
from worker.engine.sampling.draw import draw_by_chance, mix_seeds, uniforms

_SMALLEST = float(np.finfo(np.float32).tiny)  # a token that has less of a chance is never drawn


def own_from(sampling: SamplingParams, prompt: int) -> int:
    """The first place whose own token gets a log-probability, of a prompt of so many tokens."""
    return max(0, prompt - 1 - sampling.prompt_logprobs_last) if sampling.prompt_logprobs_last else 0


def others_from(sampling: SamplingParams) -> int | None:
    """The first place of which another token is wanted; None: of none is."""
    if sampling.prompt_draws:
        return 0
    return next((place for place, ids in enumerate(sampling.prompt_named) if ids), None)


def others(
    sampling: SamplingParams, logits_LV: mx.array, logprobs_LV: mx.array, first: int
) -> list[list[TokenLogprob]]:
    """Of the places from `first` on: the tokens that are named there, in their order, then those that are drawn."""
    count = logits_LV.shape[0]
    named = [list(ids) for ids in sampling.prompt_named[first : first + count]]
    named += [[] for _ in range(count - len(named))]
    found = _told(named, logprobs_LV)
    if sampling.prompt_draws:
        drawn = [_drawn(sampling, logits_LV, first, at) for at in range(sampling.prompt_draws)]
        by_place = np.stack([np.array(ids_L) for ids_L in drawn], axis=1).tolist()
        found = [[*own, *more] for own, more in zip(found, _told(by_place, logprobs_LV), strict=True)]
    return found


def _told(ids: Sequence[list[int]], logprobs_LV: mx.array) -> list[list[TokenLogprob]]:
    flat = [(place, token) for place, tokens in enumerate(ids) for token in tokens]
    if not flat:
        return [[] for _ in ids]
    places_N, tokens_N = (mx.array(list(each)) for each in zip(*flat, strict=True))
    values = iter(cast(list[float], logprobs_LV[places_N, tokens_N].tolist()))
    return [[TokenLogprob(token, next(values)) for token in tokens] for tokens in ids]


def _drawn(sampling: SamplingParams, logits_LV: mx.array, first: int, at: int) -> mx.array:
    """One token [L] for each place: the one number `at` of those that are drawn there."""
    if sampling.temperature < LEAST_TEMPERATURE:
        return mx.argmax(logits_LV, axis=-1)
    chances_LV = mx.softmax(logits_LV.astype(mx.float32) / sampling.temperature, axis=-1)
    places_L = np.arange(first, first + logits_LV.shape[0], dtype=np.int64)
    # Another seed than the completion's: its tokens must not be those that are drawn here.
    numbers_L1 = uniforms(mix_seeds([~sampling.seed]), places_L * sampling.prompt_draws + at)
    return draw_by_chance(chances_LV, mx.full((len(places_L), 1), _SMALLEST), numbers_L1)
