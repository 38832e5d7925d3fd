"""What layers of every kind have read is found again: the tokens of a cold run, from fewer ids."""

import mlx.core as mx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_model.loader import LoadedModel
from shared.sequences import SequenceSpec
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.kv_models import (
    BOUNDED,
    CONFIGS,
    PLAIN,
    QUANTISED,
    RECURRENT,
    WINDOW,
    WINDOWED,
    Model,
    in_one_piece,
)
from worker.engine.prefixes.prefix_cache import PrefixCache, Prompt
from worker.engine.prefixes.slabs import KvRows

BLOCK = 16


def bench_of(loaded: LoadedModel, **config: object) -> Bench:
    return Bench(loaded, **{"block_size": BLOCK, "prefill_chunk": 128} | config)


def check_like_cold(loaded: LoadedModel, bench: Bench, *specs: SequenceSpec) -> None:
    """The bench's tokens and log-probabilities of these are those of an engine that has read nothing else."""
    for one in specs:
        assert len(bench.tokens(one.id)) == one.sampling.max_tokens
        if one.sampling.temperature == 0 and not any(loaded.kv.packings):  # else rounding in other places shows
            tokens, logprobs = in_one_piece(loaded, one.prompt_ids, bench.tokens(one.id))
        else:
            cold = bench_of(loaded, prefix_cache_bytes=0)
            cold.submit(one)
            cold.run()
            tokens, logprobs = cold.tokens(one.id), cold.logprobs(one.id)
        assert bench.tokens(one.id) == tokens, one.id
        assert bench.logprobs(one.id) == pytest.approx(logprobs, abs=1e-3), one.id


def cached(bench: Bench, seq: str) -> int:
    return bench.finish(seq).cached_tokens


@pytest.mark.long
@pytest.mark.parametrize("name", [*sorted(CONFIGS), *QUANTISED[:3]])
@pytest.mark.parametrize("length", [WINDOW - 6, 150], ids=["short", "long"])
def test_a_second_turn_goes_on_from_the_answer(name: str, length: int, model_of: Model) -> None:
    loaded = model_of(name)
    bench = bench_of(loaded)
    bench.submit(one := spec("one", prompt_of(length)))
    bench.run()
    history = [*one.prompt_ids, *bench.tokens("one")]
    bench.submit(two := spec("two", [*history, *prompt_of(20, 1)]))
    bench.run()
    known = len(history) - 1  # the last token was told before it was fed, or is in the block behind
    expected = known // BLOCK * BLOCK if name.startswith(PLAIN) else known
    assert expected <= cached(bench, "two") <= len(history)
    bench.submit(three := spec("three", [*history, *two.prompt_ids[len(history) :], *bench.tokens("two"), 7, 8, 9]))
    bench.run()
    assert cached(bench, "three") > cached(bench, "two")
    check_like_cold(loaded, bench, two, three)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_answers_of_batch_work_are_kept_where_a_turn_follows(name: str, model_of: Model) -> None:
    loaded, prompt = model_of(name), prompt_of(70)
    for has_next_turn in (False, True):
        bench = bench_of(loaded)
        one = spec("one", prompt, max_tokens=40)
        bench.submit(msgspec.structs.replace(one, sequence_class="batch", has_next_turn=has_next_turn))
        bench.run()
        bench.submit(two := spec("two", [*prompt, *bench.tokens("one"), *prompt_of(9, 1)]))
        bench.run()
        assert (cached(bench, "two") > len(prompt)) == has_next_turn
        check_like_cold(loaded, bench, two)


def test_a_cancelled_answer_is_not_kept(model_of: Model) -> None:
    bench = bench_of(model_of("lfm2"))
    bench.submit(spec("one", prompt_of(70), max_tokens=200))
    bench.until(lambda: len(bench.tokens("one")) > 20)
    before = bench.engine.stats().prefix
    bench.engine.cancel("one")
    bench.run()
    assert bench.engine.stats().prefix == before


@pytest.mark.parametrize("name", [*WINDOWED, *RECURRENT])
def test_a_turn_that_renders_the_answer_otherwise_goes_on_from_the_prompt(name: str, model_of: Model) -> None:
    """As a template does that leaves thinking out: the prompt's own last ids are gone, too."""
    loaded = model_of(name)
    bench = bench_of(loaded)
    prompt = prompt_of(150)
    bench.submit(spec("one", prompt))
    bench.run()
    bench.submit(two := spec("two", [*prompt[:-4], *prompt_of(30, 1)]))
    bench.run()
    assert cached(bench, "two") >= len(prompt) - 8 - BLOCK
    check_like_cold(loaded, bench, two)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "qwen3_5", "lfm2", "jamba"])
def test_a_beginning_that_others_share_is_found_where_they_part(name: str, model_of: Model) -> None:
    loaded = model_of(name)
    bench, shared = bench_of(loaded), prompt_of(100)
    specs = [spec(f"s{at}", [*shared, *prompt_of(60, at + 1)]) for at in range(3)]
    for one in specs:
        bench.submit(one)
        bench.run()
    assert [cached(bench, one.id) for one in specs] == [0, 0, 96]
    check_like_cold(loaded, bench, *specs)


@pytest.mark.long
@pytest.mark.parametrize("name", [*sorted(CONFIGS), *QUANTISED, *BOUNDED[:2]])
def test_hits_and_misses_of_any_length_decode_in_one_batch(name: str, model_of: Model) -> None:
    loaded = model_of(name)
    bench, shared = bench_of(loaded), prompt_of(70)
    bench.submit(spec("first", shared))
    bench.run()
    specs = [spec(f"s{at}", [*shared[: 70 * (at % 2)], *prompt_of(5 + 31 * at, at + 1)]) for at in range(5)]
    bench.submit(*specs[:3])
    bench.turn()
    bench.turn()
    bench.submit(*specs[3:])
    bench.run()
    assert min(cached(bench, seq) for seq in ("s1", "s3")) > 40
    check_like_cold(loaded, bench, *specs)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", *WINDOWED, *RECURRENT, *QUANTISED[1:3], *BOUNDED[:2]])
def test_a_group_has_one_prefill_and_goes_on_as_rows(name: str, model_of: Model) -> None:
    loaded = model_of(name)
    bench = bench_of(loaded)
    for turn, prompt in enumerate((prompt_of(90), [*prompt_of(90), *prompt_of(40, 1)])):
        group = [spec(f"g{turn}.{at}", prompt, group=f"g{turn}", temperature=1.0, seed=at) for at in range(3)]
        bench.submit(*group)
        bench.run()
        check_like_cold(loaded, bench, *group)
        assert all((cached(bench, one.id) > 60) == bool(turn) for one in group)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2", "jamba"])
def test_rows_that_come_while_a_beginning_is_fed_share_it(name: str, model_of: Model) -> None:
    loaded = model_of(name)
    bench = bench_of(loaded, prefill_chunk=16)
    bench.submit(spec("decoding", prompt_of(3), max_tokens=80))
    bench.until(lambda: len(bench.tokens("decoding")) > 2)
    shared = prompt_of(200)
    bench.submit(leader := spec("leader", [*shared, *prompt_of(70, 1)]))
    bench.turn()
    followers = [spec(f"f{at}", [*shared, *prompt_of(40, 2 + at)]) for at in range(2)]
    bench.submit(*followers)
    bench.turn()
    assert not bench.tokens("leader")
    bench.run()
    assert [cached(bench, one.id) for one in followers] == [192, 192]
    check_like_cold(loaded, bench, leader, *followers)


# -- any schedule

ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from([10, 40, 70]), st.integers(1, 3)),
    st.tuples(st.just("go on"), st.integers(0, 9), st.integers(4, 5)),
    st.tuples(st.just("leave"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("turn"), st.integers(1, 6), st.just(0)),
)
LIMIT = 16 << 10  # of the KV of a few prompts


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2", "lfm2 4", "llama last-24"])
@settings(max_examples=10)
@given(schedule=st.lists(ACTIONS, min_size=8, max_size=24))
def test_any_schedule_gives_the_tokens_of_cold_runs(
    name: str, model_of: Model, schedule: list[tuple[str, int, int]]
) -> None:
    loaded = model_of(name)
    bench = bench_of(loaded, prefill_chunk=32, prefix_cache_bytes=LIMIT)
    specs: list[SequenceSpec] = []

    def ask(prompt: list[int]) -> None:
        specs.append(spec(f"s{len(specs)}", prompt, max_tokens=5))
        bench.submit(specs[-1])

    for action, number, seed in schedule:
        if action == "turn":
            for _ in range(number):
                bench.turn()
        elif action == "ask":
            ask([*prompt_of(number), *prompt_of(3 + 13 * seed, seed)])
        elif specs and action == "leave":
            bench.engine.cancel(specs[number % len(specs)].id)
        elif specs:
            before = specs[number % len(specs)]
            if len(before.prompt_ids) < 200 and bench.tokens(before.id):
                ask([*before.prompt_ids, *bench.tokens(before.id), *prompt_of(5, seed)])
    bench.run()
    for one in specs:
        tokens = bench.tokens(one.id)
        assert not tokens or tokens == in_one_piece(loaded, one.prompt_ids, tokens)[0]
        assert len(tokens) == 5 or bench.finish(one.id).reason == "cancelled"
    stats = bench.engine.stats().prefix
    assert stats.bytes <= LIMIT and stats.snapshot_bytes <= stats.bytes
    bench.engine.clear_cache(rows=False)
    stats = bench.engine.stats().prefix
    assert (stats.bytes, stats.blocks, stats.snapshots, stats.snapshot_bytes) == (0, 0, 0, 0)


# -- memory


@pytest.mark.parametrize("name", ["lfm2", "qwen3 8"])
def test_hits_share_what_is_stored(name: str, model_of: Model) -> None:
    loaded = model_of(name)
    cache = PrefixCache(1 << 30, BLOCK, "base", loaded.kv.new(loaded.model))
    ids = prompt_of(160)
    kv = loaded.kv.new(loaded.model)
    loaded.model(mx.array(ids)[None], cache=kv)
    cache.store([Prompt(ids, "")], KvRows.of(kv), at_end=True)
    del kv
    cache.longest(ids, "", len(ids))
    before = mx.get_active_memory()
    hits = [cache.longest(ids, "", len(ids)) for _ in range(8)]
    mx.eval([layer.state for hit in hits for layer in hit.kv])
    assert [hit.length for hit in hits] == [160] * 8
    assert mx.get_active_memory() - before < cache.stats.bytes, "eight hits hold less than one copy"
