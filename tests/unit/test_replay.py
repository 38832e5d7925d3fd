"""Gaps of recorded tokens, against the sampler that drew them."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_model.sampling.draw import uniforms
from shared.noise import mix_seeds
from shared.replay import bound_of, gap_of
from shared.sequences import SamplingParams

VOCAB = 64
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.6},
    "top_k_and_top_p": {"top_k": 20, "top_p": 0.8},
    "min_p": {"min_p": 0.2},
}


def uniform(seed: int, position: int) -> float:
    """The number by which a token is drawn: splitmix64 of plain integers."""

    def mixed(bits: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits = (bits ^ (bits >> shift)) * factor % 2**64
        return bits ^ (bits >> 31)

    golden = 0x9E3779B97F4A7C15
    return (mixed((mixed((seed + golden) % 2**64) + (position + 1) * golden) % 2**64) >> 40) * 2.0**-24


def chances(seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    logits = np.random.default_rng(seed).normal(size=VOCAB) * 2
    exp = np.exp(logits - logits.max())
    return exp / exp.sum()


def reference_draw(given: Any, sampling: SamplingParams, position: int) -> int:
    """The drawn token: filters by sorting everything, then inverse CDF in the order of ids."""
    order = np.argsort(-given, kind="stable")
    keep = order[: sampling.top_k or VOCAB]
    if sampling.top_p < 1:
        mass = np.cumsum(given[keep])
        keep = keep[: int((mass - given[keep] < sampling.top_p * mass[-1]).sum())]
    if sampling.min_p:
        keep = np.array([token for token in keep if given[token] >= sampling.min_p * given.max()])
    ids = np.sort(keep)
    cumulative = np.cumsum(given[ids])
    return int(ids[int(np.searchsorted(cumulative, uniform(sampling.seed, position) * cumulative[-1], side="right"))])


def test_uniform_is_the_number_that_rows_draw_by() -> None:
    seeds, positions = [0, 7, 2**62 + 3, -5], np.array([0, 1, 999, 12_345])
    rows = np.array(uniforms(mix_seeds(seeds), positions)).ravel()
    assert [uniform(seed, int(at)) for seed, at in zip(seeds, positions, strict=True)] == rows.tolist()
    assert mx.array(rows).dtype == mx.float32


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_only_a_drawn_token_has_no_gap_and_its_neighbours_have_what_must_move(way: dict[str, Any]) -> None:
    for seed in range(40):
        sampling = SamplingParams(max_tokens=9, seed=seed, **way)
        given = chances(seed)
        drawn = reference_draw(given, sampling, 3)
        assert gap_of(given, sampling, 3, drawn) == 0
        others = [gap_of(given, sampling, 3, token) for token in range(VOCAB) if token != drawn]
        assert min(others) > 0


def test_a_token_has_the_gap_by_which_the_draw_misses_it() -> None:
    sampling = SamplingParams(max_tokens=1, seed=11)
    noise = uniform(11, 0)
    given = np.array([noise - 0.01, 0.005, 1.005 - noise, 0.0])
    assert gap_of(given, sampling, 0, 0) == pytest.approx(0.01)
    assert gap_of(given, sampling, 0, 1) == pytest.approx(0.005)
    assert gap_of(given, sampling, 0, 3) == 1


def test_greedy_rows_have_the_distance_to_the_largest() -> None:
    given = np.array([0.3, 0.45, 0.25])
    assert gap_of(given, SamplingParams(max_tokens=1, seed=0, temperature=0), 0, 0) == pytest.approx(0.15)
    assert gap_of(given, SamplingParams(max_tokens=1, seed=0, temperature=0), 0, 1) == 0


def test_a_token_that_a_filter_left_out_by_little_has_a_small_gap() -> None:
    seed = next(seed for seed in range(99) if uniform(seed, 0) > 0.7)
    given = np.array([0.4, 0.29999, 0.30001])
    assert gap_of(given, SamplingParams(max_tokens=1, seed=seed, top_k=2), 0, 2) == 0
    assert gap_of(given, SamplingParams(max_tokens=1, seed=seed, top_k=2), 0, 1) == pytest.approx(2e-5)
    assert gap_of(given, SamplingParams(max_tokens=1, seed=seed, min_p=0.75), 0, 1) == pytest.approx(2e-5)
    assert gap_of(given, SamplingParams(max_tokens=1, seed=seed, top_p=0.7), 0, 1) == pytest.approx(2e-5)


def test_rounding_may_move_less_where_numbers_have_more_digits() -> None:
    assert bound_of("float32") < bound_of("bfloat16") == bound_of("float16")
