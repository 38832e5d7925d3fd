"""Drafts change when tokens come, and nothing else: every feature beside every other, over each kind of KV."""

import random
from dataclasses import replace
from typing import Literal

import mlx.core as mx
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ConcatenateKVCache
from msgspec import structs

from mlx_model.config import SpeculationConfig
from mlx_model.loader import LoadedModel
from tests.engine.adapter_bench import AdapterBench, make_versions, row
from tests.engine.adapter_models import MadeAdapter
from tests.engine.conftest import Bench, SpiedModel, prompt_of, spec
from tests.engine.drafted import (
    ALWAYS,
    CLOSE,
    ROWS,
    accepted_unchanged,
    predicted,
)
from tests.engine.kv_models import Model
from worker.engine.batch.row_model import RowModel
from worker.engine.speculation import batch

EVERY_KIND = [
    *("llama", "llama 4", "qwen3 8", "deepseek_v3", "gemma3_text", "gpt_oss", "llama last-24", "qwen3_5 last-24"),
    *("qwen3_5", "lfm2", "lfm2 4", "jamba", "falcon_h1", "mamba2"),
]


@pytest.mark.long
@settings(max_examples=42)
@given(st.integers(0, 1 << 30), st.sampled_from(EVERY_KIND), st.booleans())
@example(782751988080, "llama 4", True)  # a code changes
@example(20, "qwen3_5 last-24", True)  # a token whose numbers a rounding moves by 2e-4
@example(26169243, "gemma3_text", True)  # a number of the seed lies 1e-7 from where another token begins
def test_drafts_change_nothing(model_of: Model, llama: LoadedModel, seed: int, name: str, always: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        draw = random.Random(f"{seed} apart")
        patch.setattr(batch, "LOOSE", draw.choice([3, batch.LOOSE]))  # far behind is soon reached
        if draw.random() < 0.5:
            patch.setattr(RowModel, "draws_in_place", lambda *_: True)
        accepted_unchanged(llama if name == "llama" else model_of(name), seed, ALWAYS if always else ROWS)


def test_a_right_prediction_takes_a_fraction_of_the_forwards(llama: LoadedModel) -> None:
    plain = Bench(llama)
    rows = predicted(plain, *(spec(f"s{at}", prompt_of(9, seed=at), max_tokens=48, temperature=1.0) for at in range(3)))
    bench = Bench(llama, speculation=ALWAYS)
    spy = SpiedModel.inside(bench)
    bench.submit(*rows)
    bench.run()
    assert [bench.tokens(each.id) for each in rows] == [plain.tokens(each.id) for each in rows]
    assert len(spy.fed) < 2 + 48 / 5
    counted = [bench.finish(each.id) for each in rows]
    assert all(each.accepted_prediction_tokens > 35 and not each.rejected_prediction_tokens for each in counted)
    stats = bench.engine.stats()
    assert stats.tokens == 3 * 48 and stats.speculation.accepted == stats.speculation.drafted


def test_each_forward_of_rows_that_decode_is_a_step_though_it_may_tell_nothing(llama: LoadedModel) -> None:
    """As one does that follows a step with drafts: it feeds what has been told already."""
    (row,) = predicted(Bench(llama), spec("s", prompt_of(9), max_tokens=40, temperature=1.0))
    bench = Bench(llama, speculation=replace(ALWAYS, own_text=False))
    spy = SpiedModel.inside(bench)
    bench.submit(structs.replace(row, prediction_ids=row.prediction_ids[:12]))
    bench.run()
    prompt, first, *decoded = spy.fed
    assert (prompt, first) == (8, 1) and 1 in decoded and max(decoded) > 1
    assert bench.engine.stats().steps == len(decoded)


def test_layers_that_we_do_not_know_get_no_drafts(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.model, "make_cache", lambda: [ConcatenateKVCache()] * 2, raising=False)
    stats = Bench(llama, speculation=ALWAYS).engine.stats().speculation
    assert not stats.is_on and stats.drafted == 0


def test_a_prompt_that_comes_again_is_drafted_from_what_was_written_for_its_tenant_only(llama: LoadedModel) -> None:
    bench = Bench(llama, speculation=ALWAYS, prefix_cache_bytes=0)
    of_a = msgspec.structs.replace(spec("a", prompt_of(9), max_tokens=40, temperature=1.0, seed=5), tenant="a")
    accepted: dict[str, int] = {}
    for seq, tenant in (("a", "a"), ("b", "b"), ("again", "a")):
        before = bench.engine.stats().speculation.accepted
        bench.submit(msgspec.structs.replace(of_a, id=seq, tenant=tenant))
        bench.run()
        accepted[seq] = bench.engine.stats().speculation.accepted - before
    assert bench.tokens("a") == bench.tokens("b") == bench.tokens("again")
    assert accepted["b"] == accepted["a"], "what another tenant has written shows in nothing"
    assert accepted["again"] > 30


def test_a_short_answer_that_comes_again_takes_one_step_behind_its_first_token(llama: LoadedModel) -> None:
    bench = Bench(llama, speculation=ALWAYS, prefix_cache_bytes=0)
    first = spec("first", prompt_of(9), max_tokens=9, temperature=1.0, seed=5)
    bench.submit(first)
    bench.run()
    end = bench.tokens("first")[4]
    assert end not in bench.tokens("first")[:4], "else it would end sooner"
    stops = structs.replace(first.sampling, stop_token_ids=(end,))
    spy = SpiedModel.inside(bench)
    before = bench.engine.stats().speculation.drafted
    bench.submit(structs.replace(first, id="again", sampling=stops))
    bench.run()
    assert bench.tokens("again") == bench.tokens("first")[:5] and bench.finish("again").reason == "stop"
    assert spy.fed == [8, 1, 4], "its prompt, the first token, three more; the end is drawn behind them"
    assert bench.engine.stats().speculation.drafted == before + 3


def test_short_sequences_that_come_and_go_all_the_time_are_drafted_for(llama: LoadedModel) -> None:
    bench = Bench(llama, speculation=SpeculationConfig(memory_bytes=1 << 20), prefix_cache_bytes=0)
    for at in range(60):
        bench.submit(spec(f"s{at}", prompt_of(9), max_tokens=6, temperature=1.0, seed=5))
        bench.turn()
        bench.turn()
    bench.run()
    assert bench.engine.stats().speculation.accepted > 0


def test_a_batch_larger_than_the_bound_gets_no_drafts(llama: LoadedModel) -> None:
    bench = Bench(llama, speculation=replace(ALWAYS, most_rows=2))
    bench.submit(*(spec(f"s{at}", [1, 2, 1, 2, 1], max_tokens=20) for at in range(3)))
    bench.run()
    assert bench.engine.stats().speculation.drafted == 0


def test_what_a_batch_larger_than_the_bound_has_written_is_kept(llama: LoadedModel) -> None:
    bench = Bench(llama, speculation=replace(ALWAYS, most_rows=2, own_text=False))
    rows = [spec(f"s{at}", prompt_of(9, seed=at), max_tokens=20, temperature=1.0) for at in range(3)]
    bench.submit(*rows)
    bench.run()
    bench.submit(structs.replace(rows[0], id="again"))
    bench.run()
    assert bench.tokens("again") == bench.tokens("s0") and bench.engine.stats().speculation.accepted > 12


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen3 8", "gemma3_text", "qwen3_5"])
def test_rows_that_are_fast_by_turns_pile_up_no_padding(model_of: Model, name: str) -> None:
    plain = Bench(model_of(name))
    rows = predicted(plain, *(spec(f"s{at}", prompt_of(9, seed=at), max_tokens=60) for at in range(2)))
    for at, each in enumerate(rows):
        turns = [id_ if (place // 12) % 2 == at else 250 for place, id_ in enumerate(each.prediction_ids)]
        rows[at] = structs.replace(each, prediction_ids=tuple(turns))
    bench = Bench(model_of(name), speculation=replace(ALWAYS, own_text=False, memory_bytes=0, overlaps=False))
    bench.submit(*rows)
    running = bench.engine.batch
    assert isinstance(running, batch.SpeculatingBatch)
    aligned = 0
    while bench.engine.rows:
        bench.turn()
        if any(running._slack):
            aligned += 1
            with mx.stream(running.stream):
                running._align()
            assert not min(running._padding)
    assert aligned > 2 and [bench.tokens(each.id) for each in rows] == [plain.tokens(each.id) for each in rows]


@pytest.mark.parametrize(("in_place", "loose", "aligns"), [(False, 256, True), (True, 256, False), (True, 3, True)])
def test_rows_end_together_again_where_it_costs_to_write_them_apart(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, *, in_place: bool, loose: int, aligns: bool
) -> None:
    """Or where one keeps much room for another that is far behind."""
    monkeypatch.setattr(RowModel, "draws_in_place", lambda *_: in_place)
    monkeypatch.setattr(batch, "LOOSE", loose)
    plain = Bench(llama)
    rows = predicted(
        plain, *(spec(f"s{at}", prompt_of(70, seed=at), max_tokens=40, temperature=1.0) for at in range(2))
    )
    rows[0] = structs.replace(rows[0], prediction_ids=rows[0].prediction_ids[:12])
    rows[1] = structs.replace(rows[1], prediction_ids=())
    bench = Bench(llama, speculation=replace(ALWAYS, own_text=False, memory_bytes=0))
    slacks, align = [], batch.align
    monkeypatch.setattr(batch, "align", lambda caches: (slacks.append(list(running._slack)), align(caches)))
    running = bench.engine.batch
    assert isinstance(running, batch.SpeculatingBatch)
    bench.submit(*rows)
    bench.run()
    assert [bench.tokens(each.id) for each in rows] == [plain.tokens(each.id) for each in rows]
    assert len(slacks) == aligns and all(max(each) > 3 for each in slacks)


def test_a_failed_forward_ends_its_rows_and_the_next_ones_are_drafted_for(llama: LoadedModel) -> None:
    rows = predicted(Bench(llama), *(spec(f"s{at}", prompt_of(9, seed=at), max_tokens=30) for at in range(2)))
    bench = Bench(llama, speculation=ALWAYS)
    spy = SpiedModel.inside(bench)
    spy.fails = lambda tokens_BL: tokens_BL.shape == (1, 6)
    bench.submit(rows[0])
    bench.run()
    assert bench.finish("s0").reason == "error"
    spy.fails = lambda tokens_BL: False
    bench.submit(rows[1])
    bench.run()
    assert bench.tokens("s1") == list(rows[1].prediction_ids) and bench.engine.stats().speculation.accepted > 15


@pytest.fixture(scope="module")
def made(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, MadeAdapter]:
    return make_versions(llama, tmp_path_factory.mktemp("adapters"))


@pytest.mark.long
@pytest.mark.parametrize("policy", ["pin", "follow"])
def test_rows_of_several_adapters_are_drafted_for_while_a_version_is_loaded(
    llama: LoadedModel, made: dict[str, MadeAdapter], policy: Literal["pin", "follow"]
) -> None:
    names = ["", "a", "b@1"]
    rows = [
        msgspec.structs.replace(row(f"s{at}", prompt_of(9, seed=at), each, max_tokens=100), adapter_policy=policy)
        for at, each in enumerate(names)
    ]
    with AdapterBench(llama, made) as plain:
        plain.publish("a@1")
        plain.provide("b@1")
        plain.submit(*rows)
        plain.run()
    rows = [msgspec.structs.replace(each, prediction_ids=tuple(plain.tokens(each.id))) for each in rows]
    with AdapterBench(llama, made, speculation=ALWAYS) as bench:
        bench.run_amid_a_hot_load(rows)
        assert bench.engine.stats().speculation.accepted > 60
        assert ("a@2" in bench.versions("s1")) == (policy == "follow")


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "llama last-24", "qwen3_5", "mamba2", "falcon_h1"])
def test_a_next_turn_begins_with_kv_that_drafts_have_left(model_of: Model, name: str) -> None:
    """A stop string ends the row inside a draft, and rows of unequal luck end at different positions."""
    plain = Bench(model_of(name), prefix_cache_bytes=0)
    rows = predicted(plain, *(spec(f"s{at}", prompt_of(20 + at, seed=at), max_tokens=40) for at in range(3)))
    stop = bytes(each for each in rows[0].prediction_ids[17:19] if each < 256).decode(errors="ignore")
    rows[0] = structs.replace(rows[0], sampling=structs.replace(rows[0].sampling, stop=(stop,)))
    rows[1] = structs.replace(rows[1], prediction_ids=rows[1].prediction_ids[::2])
    bench = Bench(model_of(name), speculation=ALWAYS, block_size=4, prefix_cache_bytes=1 << 24)
    bench.submit(*rows)
    bench.run()
    assert bench.engine.stats().speculation.accepted > 40
    needs_states = bench.engine.prefixes.needs_snapshots
    for each in rows:
        context = [*each.prompt_ids, *bench.tokens(each.id), 7, 8]
        after = spec(f"{each.id}.next", context, max_tokens=12)
        for turn in (plain, bench):
            turn.submit(after)
            turn.run()
        if not (each is rows[0] and needs_states):  # its states may have read more than it has written
            assert bench.finish(after.id).cached_tokens > len(each.prompt_ids)
        assert bench.tokens(after.id) == plain.tokens(after.id)
        assert bench.logprobs(after.id) == pytest.approx(plain.logprobs(after.id), abs=CLOSE)
