"""Log-probabilities are fp32 log-softmax of the raw logits, equal to a plain full forward."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_model.loader import LoadedModel
from shared.frames import TokenEvent, TokenLogprobs
from shared.sequences import SamplingParams, SequenceSpec
from tests.engine.conftest import Bench, SpiedModel, prompt_of, spec
from tests.engine.small_models import dense_logits


def full_logprobs(model: LoadedModel, ids: list[int]) -> np.ndarray:
    """[L, V]: row n is the distribution of ids[n + 1]."""
    logits_LV = dense_logits(model.model, ids)
    return np.array(logits_LV - mx.logsumexp(logits_LV, axis=-1, keepdims=True))


def assert_top(got: TokenLogprobs, logprobs_V: np.ndarray, count: int) -> None:
    assert [each.token for each in got] == np.argsort(-logprobs_V)[:count].tolist()
    assert np.allclose([each.logprob for each in got], np.sort(logprobs_V)[::-1][:count], atol=1e-4)


def test_chosen_and_top_logprobs_ignore_temperature_penalties_and_filters(model: LoadedModel) -> None:
    prompt, bench = prompt_of(30), Bench(model)
    bench.submit(
        spec("a", prompt, temperature=0.3, top_p=0.8, presence_penalty=1.0, top_logprobs=4),
        spec("b", prompt_of(9), temperature=1.0, top_logprobs=2),
        spec("c", prompt_of(12), temperature=1.0),
        spec("d", prompt_of(12), top_logprobs=0),
    )
    bench.run()
    for seq, ids, count in (("a", prompt, 4), ("b", prompt_of(9), 2), ("c", prompt_of(12), None)):
        tokens = bench.tokens(seq)
        expected = full_logprobs(model, ids + tokens)[len(ids) - 1 : -1]
        assert np.allclose(bench.logprobs(seq), [row[t] for row, t in zip(expected, tokens, strict=True)], atol=1e-4)
        for event, row in zip(bench.events[seq], expected, strict=True):
            if count is None:
                assert event.top_logprobs is None
            else:
                assert event.top_logprobs is not None
                assert_top(event.top_logprobs[0], row, count)
    assert all(event.top_logprobs == [()] for event in bench.events["d"])


@pytest.mark.parametrize("chunk", [7, 64, 512])
@pytest.mark.parametrize("positions", [5, 1000])
def test_prompt_logprobs_come_first_and_equal_a_full_forward(model: LoadedModel, chunk: int, positions: int) -> None:
    prompt = prompt_of(90)
    bench = Bench(model, prefill_chunk=chunk, score_chunk_bytes=4 * model.card.vocab_size * positions)
    bench.submit(
        spec("a", prompt, prompt_logprobs=3),
        spec("b", prompt, prompt_logprobs=0),
        spec("c", prompt),
        spec("one", [5], prompt_logprobs=1),
    )
    bench.run()
    expected = full_logprobs(model, prompt)
    for seq in ("a", "b"):
        first = bench.events[seq][0]
        assert first.tokens == [] and first.prompt_logprobs is not None
        assert first.prompt_logprobs[0] is None
        chosen = [row[token] for row, token in zip(expected, prompt[1:], strict=False)]
        assert np.allclose(first.prompt_logprobs[1:], chosen, atol=1e-4)
    tops = bench.events["a"][0].prompt_top_logprobs
    assert tops is not None and tops[0] == () and len(tops) == 90
    for got, row in zip(tops[1:], expected, strict=False):
        assert_top(got, row, 3)
    assert bench.events["b"][0].prompt_top_logprobs is None
    assert bench.events["c"][0].prompt_logprobs is None
    assert bench.events["one"][0].prompt_logprobs == [None]
    assert bench.tokens("a") == bench.tokens("b") == bench.tokens("c")


def test_a_score_has_one_logprob_per_token(model: LoadedModel) -> None:
    prompt, answer = prompt_of(40), prompt_of(25, seed=1)
    score = SequenceSpec(
        "s", "m", tuple(prompt), SamplingParams(max_tokens=1, seed=0), kind="score", score_ids=tuple(answer)
    )
    bench = Bench(model, prefill_chunk=16)
    bench.submit(score, spec("other", prompt_of(10)))
    bench.run()
    (event,) = bench.events["s"]
    assert event.finish is not None and event.finish.reason == "stop" and event.tokens == []
    expected = full_logprobs(model, prompt + answer)[len(prompt) - 1 : -1]
    assert event.score_logprobs is not None
    assert np.allclose(event.score_logprobs, [row[t] for row, t in zip(expected, answer, strict=True)], atol=1e-4)


def test_a_score_may_want_the_prompts_logprobs_too(bench: Bench) -> None:
    prompt, answer = prompt_of(20), prompt_of(5, seed=1)
    sampling = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=1)
    bench.submit(SequenceSpec("s", "m", tuple(prompt), sampling, kind="score", score_ids=tuple(answer)))
    bench.submit(SequenceSpec("e", "m", tuple(prompt), sampling, kind="score"))
    bench.run()
    (event,), (empty,) = bench.events["s"], bench.events["e"]
    assert event.prompt_logprobs is not None and len(event.prompt_logprobs) == 20
    assert event.prompt_top_logprobs is not None and len(event.prompt_top_logprobs) == 20
    assert event.score_logprobs is not None and len(event.score_logprobs) == 5
    assert empty.score_logprobs == [] and empty.prompt_logprobs is not None


def test_a_scored_prompt_never_has_all_its_logits_at_once(llama: LoadedModel) -> None:
    bench = Bench(llama, prefill_chunk=512, score_chunk_bytes=4 * llama.card.vocab_size * 8)
    spy = SpiedModel.inside(bench)
    bench.submit(spec("a", prompt_of(100), prompt_logprobs=0))
    bench.run()
    assert max(spy.fed) == 8


def test_prompt_logprobs_are_not_sent_again_after_a_takeover(bench: Bench) -> None:
    prior = (TokenEvent("a", 1, 0, [], [], prompt_logprobs=[None, -1.0]), TokenEvent("a", 1, 0, [4], [-0.5]))
    bench.submit(spec("a", prompt_of(2), prompt_logprobs=0), prior=prior, attempt=2)
    bench.run()
    assert all(event.prompt_logprobs is None for event in bench.events["a"])


@pytest.mark.parametrize("chunk", [7, 512])
def test_a_prompts_last_logprobs_cost_no_more_than_they_need(llama: LoadedModel, chunk: int) -> None:
    prompt, bench = prompt_of(90), Bench(llama, prefill_chunk=chunk)
    bench.submit(spec("before", prompt_of(90), max_tokens=1))
    bench.run()
    spy = SpiedModel.inside(bench)
    bench.submit(spec("last", prompt, max_tokens=1, prompt_logprobs=2, prompt_logprobs_last=5))
    bench.run()
    event, expected = bench.events["last"][0], full_logprobs(llama, prompt)
    assert event.prompt_logprobs is not None and event.prompt_top_logprobs is not None
    assert event.prompt_logprobs[:85] == [None] * 85 and event.prompt_top_logprobs[:85] == [()] * 85
    chosen = [expected[place][prompt[place + 1]] for place in range(84, 89)]
    assert np.allclose(event.prompt_logprobs[85:], chosen, atol=1e-4)
    for got, place in zip(event.prompt_top_logprobs[85:], range(84, 89), strict=True):
        assert_top(got, expected[place], 2)
    assert bench.finish("last").cached_tokens >= 64 and sum(spy.fed) <= 90 - 64


def test_prompts_of_one_text_may_ask_for_other_parts_of_it(model: LoadedModel) -> None:
    prompt, bench = prompt_of(40), Bench(model)
    bench.submit(
        spec("last", prompt, prompt_logprobs=0, prompt_logprobs_last=3),
        spec("whole", prompt, prompt_logprobs=1),
        spec("named", prompt, prompt_logprobs=0, prompt_logprobs_last=1, prompt_named=((), (), (5, 9), (5,))),
    )
    bench.run()
    last, whole, named = (bench.events[seq][0] for seq in ("last", "whole", "named"))
    assert last.prompt_logprobs is not None and whole.prompt_logprobs is not None and named.prompt_logprobs is not None
    assert last.prompt_logprobs == [None] * 37 + whole.prompt_logprobs[37:]
    assert named.prompt_logprobs == [None] * 39 + whole.prompt_logprobs[39:]
    assert named.prompt_others is not None and len(named.prompt_others) == 40
    expected = full_logprobs(model, prompt)
    assert [[each.token for each in row] for row in named.prompt_others[:5]] == [[], [], [], [5, 9], [5]]
    assert np.allclose([each.logprob for each in named.prompt_others[3]], expected[2][[5, 9]], atol=1e-4)
    assert np.allclose(named.prompt_others[4][0].logprob, expected[3][5], atol=1e-4)
    assert last.prompt_others is None and whole.prompt_others is None


def test_tokens_drawn_in_a_prompts_places_follow_the_models_chances(llama: LoadedModel) -> None:
    prompt, many = [5, 9, 5], 2000
    asked = spec("a", prompt, max_tokens=1, seed=3, temperature=0.7, prompt_logprobs=0, prompt_draws=many)
    greedy = spec("g", prompt, max_tokens=1, prompt_logprobs=0, prompt_draws=2)
    whole = Bench(llama)
    whole.submit(asked, greedy)
    whole.run()
    pieces = Bench(llama, prefill_chunk=1)
    pieces.submit(asked)
    pieces.run()
    drawn = whole.events["a"][0].prompt_others
    assert drawn is not None and drawn[0] == () and [len(row) for row in drawn[1:]] == [many] * 2
    again = pieces.events["a"][0].prompt_others
    assert again is not None and [[t.token for t in row] for row in again] == [[t.token for t in row] for row in drawn]
    best = whole.events["g"][0].prompt_others
    logprobs = full_logprobs(llama, prompt)
    for place in range(2):
        tempered = np.exp(logprobs[place] / 0.7)
        chances = tempered / tempered.sum()
        told = {each.token: each.logprob for each in drawn[place + 1]}
        assert np.allclose(list(told.values()), logprobs[place][list(told)], atol=1e-4)
        counts = np.bincount([each.token for each in drawn[place + 1]], minlength=len(chances))
        # Pearson's statistic over tokens that are to be expected: mean their number, deviation sqrt(2 of it).
        common = chances * many >= 5
        off = ((counts - many * chances)[common] ** 2 / (many * chances)[common]).sum()
        assert off < common.sum() + 6 * np.sqrt(2 * common.sum())
        assert best is not None
        assert {each.token for each in best[place + 1]} == {int(logprobs[place].argmax())}
