"""Interactive sequences beside a batch: whose prompt is fed, and what an arriving one waits for."""

from typing import Any

import msgspec
import pytest

from mlx_model.device import on_cpu
from mlx_model.loader import LoadedModel
from shared.sequences import SequenceSpec
from tests.engine.conftest import Bench, SpiedModel, prompt_of, spec
from worker.engine.batch import running_batch
from worker.engine.scheduler import PASSES


def of_batch(seq: str, prompt: list[int], **options: Any) -> SequenceSpec:
    return msgspec.structs.replace(spec(seq, prompt, **options), sequence_class="batch")


def filled(llama: LoadedModel, **options: Any) -> tuple[Bench, SpiedModel]:
    """A worker on which six batch rows decode."""
    bench = Bench(llama, **options)
    bench.submit(*(of_batch(f"b{i}", prompt_of(9 + i), max_tokens=90) for i in range(6)))
    bench.until(lambda: all(bench.tokens(f"b{i}") for i in range(6)))
    return bench, SpiedModel.inside(bench)


def test_an_interactive_prompt_is_fed_before_batch_prompts_that_came_first(llama: LoadedModel) -> None:
    bench, _ = filled(llama, max_rows=64, prefill_chunk=32)
    bench.submit(*(of_batch(f"w{i}", prompt_of(30 + i % 3)) for i in range(20)))
    bench.turn()
    bench.submit(spec("i", prompt_of(20)))
    bench.turn()
    assert len(bench.tokens("i")) == 1
    assert not all(bench.tokens(f"w{i}") for i in range(20))


def test_a_batch_prompt_that_has_begun_pauses(llama: LoadedModel) -> None:
    bench, spy = filled(llama, prefill_chunk=64)
    bench.submit(of_batch("long", prompt_of(700)))
    bench.turn()
    bench.turn()
    spy.fed.clear()
    bench.submit(spec("i", prompt_of(60)))
    bench.turn()
    assert bench.tokens("i") and spy.fed[:2] == [59, 1], "its prompt and its first token, and nothing before them"
    bench.run()
    assert bench.finish("long").reason == "length"


@pytest.mark.parametrize("kind", [{"prompt_logprobs": 0}, {"group": "g"}], ids=str)
def test_a_batch_prompt_in_the_lane_pauses_too(llama: LoadedModel, kind: dict[str, Any]) -> None:
    bench, spy = filled(llama, max_rows=16, prefill_chunk=64)
    bench.submit(*(of_batch(f"long{i}", prompt_of(700), **kind) for i in range(2)))
    bench.turn()
    spy.fed.clear()
    bench.submit(spec("i", prompt_of(60)))
    bench.turn()
    assert bench.tokens("i") and spy.fed[:2] == [59, 1]
    bench.run()


def test_an_interactive_score_is_fed_before_a_batch_one(llama: LoadedModel) -> None:
    bench = Bench(llama, prefill_chunk=16)
    bench.submit(of_batch("long", prompt_of(700), prompt_logprobs=0, max_tokens=1))
    bench.turn()
    bench.submit(spec("i", prompt_of(100), prompt_logprobs=0, max_tokens=1))
    bench.until(lambda: "i" in bench.events)
    assert "long" not in bench.events
    bench.run()


def test_a_batch_prompt_gets_its_turns_while_interactive_prompts_keep_coming(llama: LoadedModel) -> None:
    bench = Bench(llama, max_rows=64, prefill_chunk=32)
    bench.submit(spec("stream", [1], max_tokens=900))
    bench.until(lambda: bool(bench.tokens("stream")))
    bench.submit(of_batch("long", prompt_of(10 * 32), max_tokens=1))
    turns = 0
    while not bench.tokens("long"):
        bench.submit(spec(f"i{turns}", prompt_of(31, turns), max_tokens=2))
        bench.turn()
        turns += 1
    assert 10 * PASSES < turns <= 11 * (PASSES + 1)
    assert all(bench.tokens(f"i{turn}") for turn in range(turns // 2)), "and they are fed, too"


@pytest.mark.skipif(not on_cpu(), reason="a GPU has the next decode step already, and computes it meanwhile")
def test_first_tokens_do_not_wait_for_the_batch_s_next_step(llama: LoadedModel) -> None:
    bench, spy = filled(llama)
    before = len(bench.tokens("b0"))
    spy.fed.clear()
    bench.submit(spec("i", prompt_of(20)))
    bench.turn()
    assert len(bench.tokens("i")) == 1
    assert spy.fed == [19, 1], "its own forwards alone: the next decode step would be waited for"
    assert len(bench.tokens("b0")) == before + 1, "the step that was under way comes out besides"
    bench.turn()
    assert spy.fed == [19, 1, 7]


@pytest.mark.parametrize("tells_at_once", [True, False])
def test_a_batch_decodes_while_first_tokens_come_in_every_turn(
    llama: LoadedModel, tells_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_batch, "on_cpu", lambda: tells_at_once)
    bench, _ = filled(llama)
    before, turns = len(bench.tokens("b0")), 5 * (PASSES + 1)
    for turn in range(turns):
        bench.submit(spec(f"i{turn}", prompt_of(5), max_tokens=1))
        bench.turn()
    assert len(bench.tokens("b0")) - before >= 5 - tells_at_once
    assert all(bench.finish(f"i{turn}").reason == "length" for turn in range(turns - 1))


def test_prompts_that_arrive_among_interactive_rows_join_without_a_forward_of_their_own(llama: LoadedModel) -> None:
    bench = Bench(llama)
    bench.submit(*(spec(f"s{i}", prompt_of(9 + i), max_tokens=500) for i in range(3)))
    bench.until(lambda: all(bench.tokens(f"s{i}") for i in range(3)))
    spy = SpiedModel.inside(bench)
    bench.submit(spec("late", prompt_of(20)), spec("later", prompt_of(25)))
    bench.turn()
    assert spy.fed == [2 * 24, 5]
    assert not bench.tokens("late")
    bench.turn()
    assert len(bench.tokens("late")) == len(bench.tokens("later")) == 1


Alone = list[tuple[list[int], list[float]]]  # tokens and log-probabilities of each
ALONE: dict[tuple[str, str], Alone] = {}


def alone_of(model: LoadedModel, prompts: list[list[int]], options: dict[str, Any]) -> Alone:
    alone = []
    for index, prompt in enumerate(prompts):
        bench = Bench(model)
        bench.submit(spec(f"s{index}", prompt, max_tokens=8, seed=index, **options))
        bench.run()
        alone.append((bench.tokens(f"s{index}"), bench.logprobs(f"s{index}")))
    return alone


@pytest.mark.long
@pytest.mark.parametrize("tells_at_once", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "presence_penalty": 1.5, "repetition_penalty": 1.3},
        {"temperature": 0.0, "frequency_penalty": 1.0, "min_tokens": 4},
    ],
    ids=str,
)
def test_tokens_are_those_of_a_sequence_alone(
    model: LoadedModel, options: dict[str, Any], tells_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(length) for length in (3, 40, 17, 1, 70, 29)]
    known = (model.card.name, str(options))
    if known not in ALONE:
        ALONE[known] = alone_of(model, prompts, options)
    alone = ALONE[known]
    monkeypatch.setattr(running_batch, "on_cpu", lambda: tells_at_once)
    bench = Bench(model, max_rows=32, prefill_chunk=32)
    bench.submit(*(of_batch(f"b{i}", prompt_of(30 + i), max_tokens=40) for i in range(4)))
    for index, prompt in enumerate(prompts):
        bench.turn()
        bench.turn()
        one = spec(f"s{index}", prompt, max_tokens=8, seed=index, **options)
        bench.submit(one if index % 3 else msgspec.structs.replace(one, sequence_class="batch"))
    bench.run()
    for index, (tokens, logprobs) in enumerate(alone):
        assert bench.tokens(f"s{index}") == tokens
        assert bench.logprobs(f"s{index}") == pytest.approx(logprobs, abs=2e-4)
