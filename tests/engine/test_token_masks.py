"""Allowed tokens, bad words and log-probabilities of tokens that a row names itself."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_model.loader import LoadedModel
from shared.frames import TokenEvent
from shared.sequences import SamplingParams, SequenceSpec
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.test_logprobs import assert_top, full_logprobs
from worker.engine.batch.row import Row
from worker.engine.batch.sampler import _Plan
from worker.engine.messages import RowRequest

VOCAB = 50


def row(completion: list[int], **sampling: object) -> Row:
    params = SamplingParams(**({"max_tokens": 99, "seed": 0, "temperature": 0.0} | sampling))  # type: ignore[arg-type]
    prior = (TokenEvent("s", 1, 0, completion, [0.0] * len(completion)),)
    return Row(RowRequest(SequenceSpec("s", "m", (8, 9), params), 2, prior), frozenset({2}), None)


def logits(*best: int) -> mx.array:
    """One row a list: its most likely token, then the next ones."""
    rows = np.zeros((1, VOCAB), np.float32)
    for rank, token in enumerate(best):
        rows[0, token] = 10 - rank
    return mx.array(rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_but_allowed_tokens_is_drawn(llama: LoadedModel, temperature: float) -> None:
    bench = Bench(llama)
    bench.submit(
        spec("a", prompt_of(12), temperature=temperature, allowed_token_ids=(7, 9, 200)),
        spec("b", prompt_of(20), temperature=temperature, allowed_token_ids=(3,)),
        spec("free", prompt_of(9), temperature=temperature),
    )
    bench.run()
    assert set(bench.tokens("a")) <= {7, 9, 200} and set(bench.tokens("b")) == {3}
    alone = Bench(llama)
    alone.submit(spec("free", prompt_of(9), temperature=temperature))
    alone.run()
    assert alone.tokens("free") == bench.tokens("free"), "a neighbour's mask changed a row"


def contains(tokens: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(tokens[at : at + len(word)]) == word for at in range(len(tokens)))


def test_bad_words_never_come_and_the_tokens_before_them_may(llama: LoadedModel) -> None:
    prompt = prompt_of(12)
    plain = Bench(llama)
    plain.submit(spec("s", prompt, max_tokens=12))
    plain.run()
    said = plain.tokens("s")
    words = (tuple(said[3:6]), (said[8],))
    bench = Bench(llama)
    bench.submit(spec("s", prompt, max_tokens=12, bad_words=words), spec("other", prompt_of(9)))
    bench.run()
    got = bench.tokens("s")
    until = next(at for at in range(len(said)) if any(contains(said[: at + 1], word) for word in words))
    assert got[:until] == said[:until], "the word's beginning is allowed"
    assert got[until] != said[until]
    assert not any(contains(got, word) for word in words)


def test_a_takeover_keeps_to_the_bad_words_that_its_prior_tokens_began(llama: LoadedModel) -> None:
    prompt = prompt_of(12)
    plain = Bench(llama)
    plain.submit(spec("s", prompt, max_tokens=12))
    plain.run()
    said = plain.tokens("s")
    word = tuple(said[3:6])
    taken = next(at for at in range(len(said)) if contains(said[: at + 1], word))
    whole = Bench(llama)
    whole.submit(spec("s", prompt, bad_words=(word,)))
    whole.run()
    resumed = Bench(llama)
    prior = (TokenEvent("s", 1, 0, said[:taken], [0.0] * taken),)
    resumed.submit(spec("s", prompt, bad_words=(word,)), prior=prior, attempt=2)
    resumed.run()
    assert said[:taken] + resumed.tokens("s") == whole.tokens("s")


def test_the_history_grows_by_the_input_that_the_host_has_not_seen() -> None:
    plan = _Plan((row([], bad_words=((4, 5), (9, 5, 6))),), VOCAB, 256)
    assert plan.draw(logits(5, 7), mx.array([[4]])).item() == 5  # the input is the prompt's last token: no completion
    assert plan.draw(logits(4, 7), mx.array([[9]])).item() == 4
    assert plan.draw(logits(5, 7), mx.array([[4]])).item() == 7, "4 5 is bad"
    built_anew = row([4], bad_words=((4, 5),))
    assert _Plan((built_anew,), VOCAB, 256).draw(logits(5, 7), mx.array([[4]])).item() == 7
    built_anew.position = 2  # one more is in flight
    assert _Plan((built_anew,), VOCAB, 256).draw(logits(5, 7), mx.array([[8]])).item() == 5
    longer = row([9, 5], bad_words=((9, 5, 6),))
    assert _Plan((longer,), VOCAB, 256).draw(logits(6, 7), mx.array([[5]])).item() == 7


def test_a_row_gets_the_log_probabilities_of_the_tokens_that_it_names(llama: LoadedModel) -> None:
    prompt, vocab = prompt_of(30), llama.card.vocab_size
    bench = Bench(llama)
    bench.submit(
        spec("asks", prompt, logprob_token_ids=(9, 3, 200), top_logprobs=0),
        spec("all", prompt_of(9), top_logprobs=vocab, max_tokens=2),
        spec("two", prompt_of(14), top_logprobs=2),
        spec("none", prompt_of(17)),
    )
    bench.run()
    for seq, ids in (("asks", prompt), ("two", prompt_of(14)), ("all", prompt_of(9))):
        tokens = bench.tokens(seq)
        expected = full_logprobs(llama, ids + tokens)[len(ids) - 1 : -1]
        for event, row_V in zip(bench.events[seq], expected, strict=True):
            assert event.top_logprobs is not None
            (got,) = event.top_logprobs
            if seq == "asks":
                assert [each.token for each in got] == [9, 3, 200]
                assert np.allclose([each.logprob for each in got], row_V[[9, 3, 200]], atol=1e-4)
            else:
                assert_top(got, row_V, vocab if seq == "all" else 2)
    assert all(event.top_logprobs is None for event in bench.events["none"])
