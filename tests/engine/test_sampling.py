"""The distribution of each row is the one that a plain numpy reference computes."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mlx_model.device import PRETENDS
from mlx_model.sampling.cuda import draws
from mlx_model.sampling.draw import (
    draw_by_chance,
    largest_by_blocks,
    nucleus_by_halving,
    nucleus_threshold,
    uniforms,
    uniforms_at,
)
from shared.frames import TokenEvent
from shared.noise import mix_seeds
from shared.sequences import SamplingParams, SequenceSpec
from worker.engine.batch import sampler
from worker.engine.batch.row import Row
from worker.engine.batch.sampler import Guesses, SamplingPlan
from worker.engine.messages import RowRequest

PROMPT = (1, 2, 2, 3, 40)
COMPLETION = [3, 3, 5, 7, 3]
EOS = 9


def params(**sampling: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 1000, "seed": 0} | sampling))  # type: ignore[arg-type]


def row_of(sampling: SamplingParams, completion: list[int] = COMPLETION) -> Row:
    prior = (TokenEvent("s", 1, 0, list(completion), [0.0] * len(completion)),)
    return Row(RowRequest(SequenceSpec("s", "m", PROMPT, sampling), 2, prior), frozenset({EOS}), None)


def reference(logits_V: np.ndarray, s: SamplingParams, completion: list[int] = COMPLETION) -> np.ndarray:
    """Probabilities [V], in float64 and one step at a time."""
    z = logits_V.astype(np.float64).copy()
    for token, bias in s.logit_bias.items():
        z[token] += bias
    if len(completion) < s.min_tokens:
        z[[*s.stop_token_ids, *([] if s.ignore_eos else [EOS])]] = -np.inf
    for token in {*PROMPT, *completion}:
        z[token] = z[token] / s.repetition_penalty if z[token] > 0 else z[token] * s.repetition_penalty
    for token in set(completion):
        z[token] -= s.frequency_penalty * completion.count(token) + s.presence_penalty
    if s.temperature == 0:
        return np.eye(len(z))[z.argmax()]
    z = z / s.temperature
    p = np.exp(z - z.max())
    order = np.argsort(-p)
    if s.top_k:
        p[order[s.top_k :]] = 0
    p /= p.sum()
    if s.top_p < 1:
        above = np.cumsum(p[order]) - p[order]
        p[order[above >= s.top_p]] = 0
    p[p < s.min_p * p.max()] = 0
    return p / p.sum()


def drawn(logits_V: np.ndarray, s: SamplingParams, count: int, candidates: int = 16) -> np.ndarray:
    """Frequencies [V] of `count` rows that differ in their seeds only."""
    rows = tuple(row_of(replace(s, seed=seed)) for seed in range(count))
    logits_BV = mx.broadcast_to(mx.array(logits_V.astype(np.float32)), (count, len(logits_V)))
    tokens_B = SamplingPlan(rows, len(logits_V), candidates).draw(logits_BV, mx.zeros((count, 1), mx.uint32))
    assert tokens_B.dtype == mx.uint32
    return np.bincount(np.array(tokens_B), minlength=len(logits_V)) / count


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 500},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"top_p": 0.9999},
        {"top_k": 12, "top_p": 0.7},
        {"top_k": 40, "top_p": 0.99, "temperature": 1.5},
        {"min_p": 0.2},
        {"min_p": 0.05, "top_p": 0.9, "top_k": 30, "temperature": 1.3},
        {"logit_bias": {4: 6.0, 0: -100.0}},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.9},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.7, "presence_penalty": -1.0, "temperature": 0.0},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "top_p": 0.8},
        {"min_tokens": 6, "stop_token_ids": (3, 4)},
        {"min_tokens": 5, "stop_token_ids": (3, 4)},
    ],
    ids=str,
)
@pytest.mark.parametrize(("vocab", "count"), [(50, 4000), (2048, 1500)])
def test_draws_follow_the_reference(sampling: dict[str, object], vocab: int, count: int) -> None:
    logits_V = np.random.default_rng(1).normal(size=vocab) * 3
    s = params(**sampling)
    expected, got = reference(logits_V, s), drawn(logits_V, s, count)
    assert not got[expected == 0].any(), "drew a token that the filters exclude"
    deviation = np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(got - expected) <= 5 * deviation + 1e-3).all()


def test_rows_with_different_parameters_share_a_call() -> None:
    vocab, rng = 2048, np.random.default_rng(2)
    logits_BV = rng.normal(size=(6, vocab)).astype(np.float32) * 3
    each = [
        params(temperature=0),
        params(top_k=3),
        params(top_p=0.999),
        params(min_p=0.4),
        params(frequency_penalty=2.0, top_k=2),
        params(logit_bias={11: 100.0}),
    ]
    rows = tuple(map(row_of, each))
    together = np.array(SamplingPlan(rows, vocab, 16).draw(mx.array(logits_BV), mx.zeros((6, 1), mx.uint32)))
    for index, row in enumerate(rows):
        alone = SamplingPlan((row,), vocab, 16).draw(
            mx.array(logits_BV[index : index + 1]), mx.zeros((1, 1), mx.uint32)
        )
        assert together[index] == alone.item()
    assert together[0] == logits_BV[0].argmax()
    assert together[5] == 11


@pytest.mark.parametrize("temperature", [9e-6, 1e-40, 5e-324])
def test_hardly_any_temperature_is_none(temperature: float) -> None:
    logits_BV = mx.array([[0.0, 3.0, 2.9, -4.0]])
    assert SamplingPlan((row_of(params(temperature=temperature)),), 4, 256).draw(logits_BV, mx.array([[0]])).item() == 1


def test_counts_grow_by_the_token_that_the_host_has_not_seen() -> None:
    vocab = 50
    row = row_of(params(temperature=0.0, frequency_penalty=1.0), [])
    logits = mx.array([[0.0, 0.9] + [-9.0] * (vocab - 2)])
    plan = SamplingPlan((row,), vocab, 256)
    assert plan.draw(logits, mx.array([[40]])).item() == 1  # the input is the prompt's last token: not counted
    assert plan.draw(logits, mx.array([[1]])).item() == 0
    assert plan.draw(logits, mx.array([[0]])).item() == 1
    row.tokens, row.position = [1, 0], 3  # rebuilt: the host knows two tokens, the third is in flight
    assert SamplingPlan((row,), vocab, 256).draw(logits, mx.array([[1]])).item() == 0


@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(1, 64),
    top_p=st.floats(0.01, 0.999) | st.just(1.0),  # closer to 1 the cut lies within the rounding of fp32
    sharpness=st.floats(0.05, 8.0),
    candidates=st.sampled_from([4, 16, 64]),
)
@settings(max_examples=80)
def test_the_nucleus_is_the_reference_s(seed: int, top_k: int, top_p: float, sharpness: float, candidates: int) -> None:
    scores_V = np.random.default_rng(seed).normal(size=64).astype(np.float32) * np.float32(sharpness)
    chances_1V = mx.softmax(mx.array(scores_V[None]), axis=-1)
    k = mx.array([[top_k]]) if top_k < 64 or top_p == 1 else None
    p = mx.array([[top_p]]) if top_p < 1 else None
    threshold, enough = nucleus_threshold(chances_1V, k, p, candidates)
    expected = reference(scores_V, params(top_k=top_k, top_p=top_p), []) > 0
    is_certain = enough is None or enough.item()
    for each in (nucleus_by_halving(chances_1V, k, p), *([threshold] if is_certain else [])):
        got = np.array(chances_1V >= each)[0]
        assert abs(int(got.sum()) - int(expected.sum())) <= 1, "rounding may move the cut by one token"
        assert (got[expected] if got.sum() >= expected.sum() else expected[got]).all()
    assert is_certain or expected.sum() > candidates or candidates < top_k


def test_halving_finds_what_a_sort_finds_ties_and_rows_without_a_limit_included() -> None:
    eighths = mx.array([[0.0, 2, 1, 1, 1, 3, 0, 0], [8, 0, 0, 0, 0, 0, 0, 0], [1] * 8]) / 8
    chances = mx.concatenate([eighths] * 6)
    top_p = mx.repeat(mx.array([0.25, 0.375, 0.5, 0.75, 1e-9, 2.0]), 3)[:, None]
    for top_k in (None, *(mx.full((18, 1), k) for k in (1, 2, 3, 5, 8))):
        for goal in (None, top_p) if top_k is not None else (top_p,):
            wanted, _ = nucleus_threshold(chances, top_k, goal, 8)
            kept = chances >= nucleus_by_halving(chances, top_k, goal)
            assert mx.array_equal(kept, chances >= wanted)


def test_a_plan_that_halves_draws_what_one_that_sorts_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "on_cpu", lambda: False)  # there nothing is sorted whole
    rows = tuple(row_of(params(seed=seed, top_p=0.1 + seed / 20)) for seed in range(16))
    logits, fed = 2 * mx.random.normal((16, 2000), key=mx.random.key(1)), mx.zeros((16, 1), mx.uint32)
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "nucleus_threshold", None)  # it is not asked
        halved = SamplingPlan(rows, 2000, 256, halves=True).draw(logits, fed).tolist()
    assert halved == SamplingPlan(rows, 2000, 256).draw(logits, fed).tolist()


def test_candidates_grow_until_they_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, vocab, asked = tuple(row_of(params(seed=seed, top_p=0.9)) for seed in range(4)), 20_000, list[int]()

    def noted(chances: mx.array, k: mx.array | None, p: mx.array | None, candidates: int) -> Any:
        asked.append(candidates)
        return nucleus_threshold(chances, k, p, candidates)

    monkeypatch.setattr(sampler, "on_cpu", lambda: True)
    monkeypatch.setattr(sampler, "nucleus_threshold", noted)
    flat, fed = mx.random.normal((4, vocab), key=mx.random.key(2)) / 8, mx.zeros((4, 1), mx.uint32)
    few = SamplingPlan(rows, vocab, 16).draw(flat, fed).tolist()
    assert asked == [16, 16 * sampler.MORE, 16 * sampler.MORE**2]
    assert few == SamplingPlan(rows, vocab, vocab).draw(flat, fed).tolist()


def test_draws_are_in_proportion_and_never_an_excluded_token() -> None:
    chances_V = mx.array([0.0, 0.2, 0.1, 0.4, 0.2, 0.1])
    grid = mx.arange(4000)[:, None] / 4000
    smallest = mx.full((4000, 1), 0.15)
    tokens = draw_by_chance(mx.broadcast_to(chances_V, (4000, 6)), smallest, grid)
    assert np.bincount(np.array(tokens), minlength=6).tolist() == [0, 1000, 0, 2000, 1000, 0]
    edge = draw_by_chance(chances_V[None], mx.array([[0.15]]), mx.array([[1 - 2**-24]]))
    assert edge.item() == 4


def test_noise_is_the_same_wherever_it_is_made() -> None:
    seeds = mix_seeds([0, 1, -1, 2**63, 2**80 + 7])
    positions = np.arange(7, dtype=np.uint64) + np.array([[0], [100], [2**31], [2**32 - 3], [5]], np.uint64)
    wanted = np.array(uniforms(np.repeat(seeds, 7), positions.ravel().astype(np.int64))).reshape(5, 7)
    made = uniforms_at(mx.array(seeds)[:, None], mx.array(positions))
    assert np.array_equal(np.array(made), wanted) and made.dtype == mx.float32


def test_uniforms_are_uniform_and_differ_by_seed_and_position() -> None:
    seeds = mix_seeds([*range(1000), -1, 2**63, 2**80 + 7])
    drawn = np.concatenate([np.array(uniforms(seeds, np.full(1003, p)))[:, 0] for p in range(100)])
    assert drawn.min() >= 0 and drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.005
    assert np.abs(np.histogram(drawn, 20, (0, 1))[0] / len(drawn) - 0.05).max() < 0.004
    assert len(np.unique(drawn)) > 0.99 * len(drawn)


def test_guesses_are_drawn_in_fp32_of_what_a_model_rounds() -> None:
    rows = tuple(row_of(params(seed=seed)) for seed in range(64))
    rounded = (3 * mx.random.normal((64, 20_000))).astype(mx.bfloat16)
    fed = mx.zeros(64, mx.uint32)
    tokens = Guesses(rows, 20_000).draw(rounded, fed)
    for each in rows:
        each.position -= 1
    assert tokens.tolist() == Guesses(rows, 20_000).draw(rounded.astype(mx.float32), fed).tolist()


def test_what_the_kernel_draws_does_not_depend_on_the_rows_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows a kernel for CUDA draws for; what it draws is tested where there is CUDA (test_cuda_draws.py)."""
    of_kernel = 3

    def stand_in(logits: mx.array, uniforms: mx.array, inverse: mx.array | None) -> tuple[mx.array, mx.array]:
        count = logits.shape[0]
        assert logits.dtype == mx.bfloat16 and uniforms.shape == (count, 1)
        asked.append(None if inverse is None else inverse[:, 0].tolist())
        return mx.full(count, of_kernel, mx.uint32), mx.full(count, -1.0)

    asked: list[list[float] | None] = []
    bare = [params(seed=1), params(seed=2, temperature=0.5), params(seed=3, top_logprobs=1)]
    others = [params(temperature=0.0), params(top_p=0.5), params(top_k=2), params(min_p=0.1), params(bad_words=((7,),))]
    others += [params(presence_penalty=1.0), params(logit_bias={5: 1.0}), params(min_tokens=99)]
    logits = mx.random.normal((len(bare) + len(others), 50)).astype(mx.bfloat16)
    logits[:, of_kernel] = -50  # nobody else's choice

    def tokens(*sampling: SamplingParams) -> list[int]:
        rows = tuple(map(row_of, sampling))
        logits_BV, fed = logits[: len(rows)], mx.zeros((len(rows), 1), mx.uint32)
        drawn_B, draw = SamplingPlan(rows, 50, 16).drawn(logits_BV, fed, ("",) * len(rows), None)
        chances = logits_BV.astype(mx.float32)
        chances -= mx.logsumexp(chances, axis=-1, keepdims=True)
        for at, token in enumerate(drawn_B.tolist()):
            by_kernel = len(asked) == 1 and len(rows) == 2
            assert draw.logprob(at) == pytest.approx(-1.0 if by_kernel else chances[at, token].item(), abs=1e-4)
        return drawn_B.tolist()

    without = tokens(*bare, *others)
    monkeypatch.setattr(draws, "are_there", lambda: True)
    monkeypatch.setattr(draws, "drawn", stand_in)
    assert tokens(*bare[:2]) == [of_kernel] * 2 and asked == [[1.0, 2.0]]
    assert tokens(*bare, *others) == [of_kernel] * 3 + without[3:] and asked[1:] == [[1.0, 2.0, 1.0]]
    assert tokens(*others) == tokens(*others) and len(asked) == 2


@pytest.mark.parametrize(("vocab", "count"), [(9000, 256), (8193, 256), (151, 4)])
def test_the_largest_by_blocks_are_those_of_all(vocab: int, count: int) -> None:
    chances_FV = mx.softmax(4 * mx.random.normal((3, vocab), key=mx.random.key(0)), axis=-1)
    crowded = mx.concatenate([mx.sort(chances_FV[:1], axis=-1), mx.round(chances_FV[1:], 4)])  # side by side, and ties
    for each in (chances_FV, crowded):
        found = largest_by_blocks(each, count)
        assert mx.array_equal(found, mx.sort(each, axis=-1)[:, ::-1][:, :count]).item()


def test_a_gpu_that_sorts_finds_the_same_candidates_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_BV = 3 * mx.random.normal((6, 9000), key=mx.random.key(0))
    ways = [{"top_k": 20}, {"top_k": 40, "top_p": 0.9}, {"top_p": 0.8}, {"top_k": 300}, {"temperature": 0.0}, {}]
    rows = tuple(row_of(params(**({"temperature": 1.0, "seed": 5} | way))) for way in ways)

    def tokens(rows: tuple[Row, ...], logits_BV: mx.array) -> list[list[int]]:
        plan, inputs_B1 = SamplingPlan(rows, logits_BV.shape[-1], 256), mx.zeros((len(rows), 1), mx.uint32)
        return [plan.draw(logits_BV, inputs_B1).tolist() for _ in range(20)]  # type: ignore[misc]

    monkeypatch.setenv(PRETENDS, "0")
    wanted = tokens(rows, logits_BV)
    monkeypatch.setenv(PRETENDS, "1")
    assert tokens(rows, logits_BV) == wanted
    alone = [tokens(rows[at : at + 1], logits_BV[at : at + 1]) for at in range(len(rows))]
    assert [list(step) for step in zip(*([token for (token,) in each] for each in alone), strict=True)] == wanted
