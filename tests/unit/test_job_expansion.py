"""The pure arithmetic of a job: seeds, ids, windows; and tokenised prompts in a bounded cache."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import UnsupportedParameterError
from shared.jobs import JobInput, JobSpec, LineRequest, SamplingOverrides, input_line
from shared.seeds import seed_in_job
from shared.sequences import ModelCard, SamplingParams
from shared.text import grammar
from tests.unit.api_texts import codec
from tests.unit.test_thinking_budget import MARKED as THINKS
from worker.jobs.expansion import (
    PreparedPrompt,
    PromptCache,
    ordinal_of,
    prepare,
    prompts_to_expand,
    sequence_id,
    sequences,
)


def job(**fields: object) -> JobSpec:
    defaults: dict[str, object] = {"id": "job-1", "kind": "rollout", "model": "m", "total_prompts": 10, "n": 4}
    return JobSpec(**{**defaults, **fields})  # type: ignore[arg-type]


def test_a_seed_is_what_the_documentation_says() -> None:
    assert seed_in_job(1, 2, 3) == 1491535104594699


@given(st.integers(0, 2**53), st.integers(0, 10**6), st.integers(0, 1023))
def test_seeds_are_exact_in_json(seed: int, prompt: int, sample: int) -> None:
    assert 0 <= seed_in_job(seed, prompt, sample) < 2**53


def test_a_group_differs_in_id_and_seed_only() -> None:
    spec = job(sampling=SamplingOverrides(max_tokens=9, seed=5, stop=("x",)), adapter="a", deadline_ms=7)
    group = sequences(spec, PreparedPrompt(3, JobInput("p"), (1, 2)), now_ms=99)
    assert [ordinal_of(sequence.id) for sequence in group] == [12, 13, 14, 15]
    assert {sequence.group for sequence in group} == {"job-1-p3"}
    assert [sequence.sampling.seed for sequence in group] == [seed_in_job(5, 3, s) for s in range(4)]
    first = group[0]
    assert (first.sampling.max_tokens, first.sampling.stop, first.adapter) == (9, ("x",), "a")
    assert (first.sequence_class, first.job, first.deadline_ms) == ("batch", "job-1", 7)


def test_reasoning_of_samples_is_bounded_in_their_own_marks() -> None:
    spec, card = job(max_reasoning_tokens=2, n=2), ModelCard("m", 1000, 1 << 20, (0,), "t", "b", 1, dtype="float32")
    prompt = prepare(0, input_line(JobInput("Why? <think>"), "rollout", 1), spec, card, THINKS)
    for sequence in sequences(spec, prompt, now_ms=0):
        matcher = grammar.matcher_of(sequence.sampling.grammar, grammar.tokenizer_of(THINKS.bundle, THINKS.vocab_size))
        ids = [*THINKS.encode("12", False), THINKS.added_token("</think>"), *THINKS.encode("so", False)]
        assert matcher.try_consume_tokens(ids) == len(ids)
        matcher.reset()
        assert matcher.try_consume_tokens(THINKS.encode("123", False)) == 2
    plain = prepare(0, input_line(JobInput("Why?"), "rollout", 1), spec, card, codec())
    assert isinstance(plain.error, UnsupportedParameterError), "a model without reasoning"


def test_a_job_or_a_line_of_a_batch_may_not_be_cached() -> None:
    private = JobInput("p", request=LineRequest(SamplingParams(1, 0), cache=False))
    for spec, line in ((job(cache=False), JobInput("p")), (job(), private)):
        assert not any(sequence.cache for sequence in sequences(spec, PreparedPrompt(0, line, (1,)), now_ms=0))


@pytest.mark.parametrize("job_id", ["job-1", "a-b-3", "x"])
def test_an_id_names_its_sample(job_id: str) -> None:
    assert ordinal_of(sequence_id(job_id, 42)) == 42


@pytest.mark.parametrize(
    ("n", "window", "expanded", "recorded", "prompts"),
    [
        (4, 16, 0, 0, 4),  # the window in whole groups
        (4, 16, 4, 0, 0),  # full
        (4, 16, 4, 3, 0),  # three places are no group
        (4, 16, 4, 4, 1),
        (4, 100, 9, 36, 1),  # only what is left
        (4, 100, 10, 40, 0),
        (50, 16, 0, 0, 1),  # a group beyond the window, alone
        (50, 16, 1, 49, 0),
        (200, 1000, 0, 0, 1),  # beyond the batch of one call
    ],
)
def test_the_window(n: int, window: int, expanded: int, recorded: int, prompts: int) -> None:
    assert prompts_to_expand(job(n=n), window, expanded, recorded, most=128) == prompts


def test_the_prompt_cache_is_bounded() -> None:
    cache = PromptCache(max_tokens=100, max_prompts=5)
    for index in range(9):
        cache.put("job", PreparedPrompt(index, JobInput("p"), tuple(range(10))))
    assert [index for index in range(9) if cache.get("job", index)] == [4, 5, 6, 7, 8]
    cache.put("job", PreparedPrompt(9, JobInput("p"), tuple(range(95))))
    assert [index for index in range(10) if cache.get("job", index)] == [9]


def test_prompts_of_an_ended_job_make_room() -> None:
    cache = PromptCache(max_tokens=40, max_prompts=4)
    places = [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("b", 2), ("a", 2)]

    def kept() -> list[tuple[str, int]]:
        return [place for place in places if cache.get(*place)]

    for job_id, index in places[:5]:
        cache.put(job_id, PreparedPrompt(index, JobInput("p"), tuple(range(9))))
    assert kept() == places[1:5], "the oldest of all jobs goes"
    cache.forget("b")
    cache.forget("b")
    assert kept() == [("a", 1)]
    for index in (0, 2):
        cache.put("a", PreparedPrompt(index, JobInput("p"), tuple(range(9))))
    cache.put("b", PreparedPrompt(0, JobInput("p"), tuple(range(9))))
    assert kept() == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
