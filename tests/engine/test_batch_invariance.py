"""A sequence's tokens depend on nothing but itself: not on who else is in the batch, nor on when they come and go."""

import random

import msgspec
import pytest
from mlx_lm.models.cache import BatchKVCache

from mlx_model.loader import LoadedModel
from shared.sequences import SequenceSpec
from tests.engine.conftest import Bench, SpiedModel, prompt_of, spec

SAMPLINGS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "logit_bias": {3: 4.0, 65: -2.0}, "top_p": 0.95},
    {"temperature": 1.0, "ignore_eos": False, "min_tokens": 9, "stop_token_ids": (17, 23)},
    {"temperature": 1.0, "top_logprobs": 3},
]


def sequences(count: int) -> list[SequenceSpec]:
    random_lengths = random.Random(5)
    return [
        spec(
            f"s{index}",
            prompt_of(random_lengths.choice([1, 2, 7, 40, 150]), seed=index),
            seed=1000 + index,
            max_tokens=random_lengths.randint(1, 24),
            **SAMPLINGS[index % len(SAMPLINGS)],
        )
        for index in range(count)
    ]


ALONE: dict[tuple[str, bytes], tuple[list[int], list[float]]] = {}


def alone(model: LoadedModel, each: SequenceSpec) -> tuple[list[int], list[float]]:
    known = (model.card.name, msgspec.json.encode(each))
    if known not in ALONE:
        bench = Bench(model)
        bench.submit(each)
        bench.run()
        ALONE[known] = bench.tokens(each.id), bench.logprobs(each.id)
    return ALONE[known]


@pytest.mark.long
def test_rows_that_join_and_leave_at_random_get_the_tokens_they_get_alone(model: LoadedModel) -> None:
    specs = sequences(30)
    bench, schedule = Bench(model, max_rows=6, prefill_chunk=32), random.Random(11)
    waiting = list(specs)
    while waiting or bench.engine.busy:
        while waiting and schedule.random() < 0.3:
            bench.submit(waiting.pop(0))
        bench.turn()
        batch = bench.engine._batch
        assert all(cache.left_padding.tolist() == batch._padding for cache in batch._cache[:-1])
    for each in specs:
        tokens, logprobs = alone(model, each)
        assert bench.tokens(each.id) == tokens, each
        assert all(abs(a - b) < 1e-4 for a, b in zip(bench.logprobs(each.id), logprobs, strict=True))


def test_nobody_waits_for_the_device_when_rows_leave(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def reads_the_padding_back(*_: object) -> None:
        raise AssertionError("mlx-lm's filter waits for the step under way")

    monkeypatch.setattr(BatchKVCache, "filter", reads_the_padding_back)
    bench.submit(*(spec(f"s{i}", prompt_of(10 + 30 * i), max_tokens=4 + i) for i in range(8)))
    bench.turn()
    bench.engine.cancel("s5")
    bench.run()
    assert all(bench.finish(f"s{i}").reason == "length" for i in range(8) if i != 5)


def test_cancelled_neighbours_change_nothing(model: LoadedModel) -> None:
    specs, bench, schedule = sequences(20), Bench(model), random.Random(3)
    bench.submit(*specs)
    doomed = {each.id for each in specs[::3]}
    while bench.engine.busy:
        if doomed and schedule.random() < 0.4:
            bench.engine.cancel(doomed.pop())
        bench.turn()
    for each in specs:
        expected, _ = alone(model, each)
        got = bench.tokens(each.id)
        assert got == expected[: len(got)], each
        assert bench.finish(each.id).reason == "cancelled" or len(got) == len(expected)


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others(bench: Bench) -> None:
    prompt = prompt_of(20)
    bench.submit(*(spec(f"s{seed}-{i}", prompt, temperature=1.0, seed=seed) for seed in (1, 2) for i in (0, 1)))
    bench.run()
    assert bench.tokens("s1-0") == bench.tokens("s1-1") != bench.tokens("s2-0") == bench.tokens("s2-1")


def test_sequences_of_one_group_prefill_once_and_equal_separate_ones(model: LoadedModel) -> None:
    prompt = prompt_of(100)
    members = [spec(f"g{i}", prompt, group="g", seed=i, temperature=1.0) for i in range(6)]
    together = Bench(model)
    fed = SpiedModel.inside(together).fed
    together.submit(*members)
    together.run()
    assert sum(size for size in fed if size > 8) < 110, "the prompt was fed once"
    for each in members:
        assert together.tokens(each.id) == alone(model, each)[0]


def test_a_late_member_joins_a_prefill_under_way(model: LoadedModel) -> None:
    prompt = prompt_of(100)
    bench = Bench(model, prefill_chunk=16)
    fed = SpiedModel.inside(bench).fed
    bench.submit(spec("a", prompt), spec("b", prompt))
    bench.turn()
    bench.submit(spec("c", prompt))
    bench.run()
    assert sum(size for size in fed if size > 8) < 110
    assert bench.tokens("a") == bench.tokens("b") == bench.tokens("c")


def test_one_token_prompts_form_a_group_too(bench: Bench) -> None:
    bench.submit(spec("a", [5], group="g"), spec("b", [5], group="g"), spec("c", [5]))
    bench.run()
    assert bench.tokens("a") == bench.tokens("b") == bench.tokens("c")
    assert len(bench.tokens("a")) == 8
