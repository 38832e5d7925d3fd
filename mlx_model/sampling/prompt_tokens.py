"""Other tokens in the places of a prompt's own: those that its reader names, and some that are drawn.

Place n is that of the prompt's token n + 1, of which the logits after token n speak. A draw depends on the row's seed,
on its place and on the place's own distribution, whatever pieces the prompt is fed in. Shape suffixes: L places, V
vocabulary, N tokens named in all of them.
"""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import numpy as np

from mlx_model.sampling.draw import draw_by_chance, uniforms
from shared.frames import TokenEvent, TokenLogprob, TokenLogprobs
from shared.noise import mix_seeds
from shared.sequences import LEAST_TEMPERATURE, SamplingParams, SequenceSpec

_SMALLEST = float(np.finfo(np.float32).tiny)  # a token that has less of a chance is never drawn


def asked_from(spec: SequenceSpec) -> int:
    """The first place of its prompt that anything is asked about."""
    own, named = _own_from(spec), (place for place, ids in enumerate(spec.sampling.prompt_named) if ids)
    return 0 if spec.sampling.prompt_draws else min(own, next(named, own))


def wants_others(sampling: SamplingParams) -> bool:
    """True if log-probabilities of tokens other than the prompt's own are asked for."""
    return bool(sampling.prompt_draws or any(sampling.prompt_named))


def report_prompt(
    event: TokenEvent,
    spec: SequenceSpec,
    first: int,
    own: Sequence[float],
    top: Sequence[TokenLogprobs],
    others: Sequence[TokenLogprobs] | None,
) -> None:
    """Put into an event what is asked about a prompt. Scores are by place from `first` on, and may go on after it.

    The prompt's first token has no log-probability.
    """
    start, end, count = _own_from(spec), len(spec.prompt_ids) - 1 - first, spec.sampling.prompt_logprobs
    asked = slice(start - first, end)
    event.prompt_logprobs = [*[None] * (start + 1), *own[asked]]
    if count:
        event.prompt_top_logprobs = [*[()] * (start + 1), *(each[:count] for each in top[asked])]
    if others is not None:
        event.prompt_others = [*[()] * (first + 1), *others[:end]]


def _own_from(spec: SequenceSpec) -> int:
    last = spec.sampling.prompt_logprobs_last
    return max(0, len(spec.prompt_ids) - 1 - last) if last else 0


def others(sampling: SamplingParams, logits_LV: mx.array, logprobs_LV: mx.array, first: int) -> list[TokenLogprobs]:
    """By place from `first` on: the tokens named there, in their order, then those that are drawn."""
    count = logits_LV.shape[0]
    named = [list(ids) for ids in sampling.prompt_named[first : first + count]]
    named += [[] for _ in range(count - len(named))]
    found = _logprobs(named, logprobs_LV)
    if sampling.prompt_draws:
        drawn = [_drawn(sampling, logits_LV, first, at) for at in range(sampling.prompt_draws)]
        by_place = np.stack([np.array(ids_L) for ids_L in drawn], axis=1).tolist()
        found = [(*own, *more) for own, more in zip(found, _logprobs(by_place, logprobs_LV), strict=True)]
    return found


def _logprobs(ids: Sequence[list[int]], logprobs_LV: mx.array) -> list[TokenLogprobs]:
    flat = [(place, token) for place, tokens in enumerate(ids) for token in tokens]
    if not flat:
        return [()] * len(ids)
    places_N, tokens_N = (mx.array(list(each)) for each in zip(*flat, strict=True))
    values = iter(cast(list[float], logprobs_LV[places_N, tokens_N].tolist()))
    return [tuple([TokenLogprob(token, next(values)) for token in tokens]) for tokens in ids]


def _drawn(sampling: SamplingParams, logits_LV: mx.array, first: int, at: int) -> mx.array:
    """One token [L] for each place: the one number `at` of those that are drawn there."""
    if sampling.temperature < LEAST_TEMPERATURE:
        return mx.argmax(logits_LV, axis=-1)
    chances_LV = mx.softmax(logits_LV.astype(mx.float32) / sampling.temperature, axis=-1)
    places_L = np.arange(first, first + logits_LV.shape[0], dtype=np.int64)
    # Another seed than the completion's: its tokens must not be those that are drawn here.
    numbers_L1 = uniforms(mix_seeds([~sampling.seed]), places_L * sampling.prompt_draws + at)
    return draw_by_chance(chances_LV, mx.full((len(places_L), 1), _SMALLEST), numbers_L1)
