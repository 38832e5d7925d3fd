"""Log-probabilities are fp32 log-softmax of the raw logits, equal to a plain full forward."""

import mlx.core as mx
import numpy as np
import pytest

from shared.frames import TokenEvent, TokenLogprob
from shared.sequences import SamplingParams, SequenceSpec
from tests.engine.conftest import Bench, SpiedModel, prompt_of, spec
from tests.engine.small_models import dense_logits
from worker.engine.model.loader import LoadedModel


def full_logprobs(model: LoadedModel, ids: list[int]) -> np.ndarray:
    """[L, V]: row n is the distribution of ids[n + 1]."""
    logits_LV = dense_logits(model.model, ids)
    return np.array(logits_LV - mx.logsumexp(logits_LV, axis=-1, keepdims=True))


def assert_top(got: list[TokenLogprob], logprobs_V: np.ndarray, count: int) -> None:
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
    assert all(event.top_logprobs == [[]] for event in bench.events["d"])


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
    assert tops is not None and tops[0] == [] and len(tops) == 90
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
