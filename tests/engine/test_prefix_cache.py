"""Prefixes that are found again: the same tokens as without them, from the right weights, within the limit."""

from collections.abc import Iterator

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache
from msgspec.structs import replace

from mlx_model.loader import LoadedModel
from shared.sequences import SamplingParams, SequenceSpec
from tests.engine.adapter_bench import AdapterBench, make_versions, row
from tests.engine.conftest import Bench, SpiedModel, prompt_of, spec
from worker.engine.prefixes.prefix_cache import PrefixCache, Prompt
from worker.engine.prefixes.slabs import KvRows

BLOCK_BYTES = 4 * 2 * 4 * 8  # of the caches made by `kv`: positions x (keys and values) x fp32 x dim


def kv(ids: list[int]) -> list[KVCache]:
    """KV of one layer that tells of the ids that it was made from."""
    cache = KVCache()
    values = mx.repeat(mx.array(ids, mx.float32)[None, None, :, None], 8, axis=-1)
    cache.update_and_fetch(values, -values)
    return [cache]


def cache_of(blocks: int, *, block_size: int = 4) -> PrefixCache:
    return PrefixCache(blocks * BLOCK_BYTES, block_size, "base", [KVCache()])


def found(cache: PrefixCache, ids: list[int], version: str = "") -> int:
    """Length of the hit, which holds the KV of exactly these ids."""
    prefix = cache.longest(ids, version, len(ids))
    for layer in prefix.kv:
        assert layer.offset == prefix.length == layer.keys.shape[2]
        assert layer.keys[0, 0, :, 0].tolist() == ids[: prefix.length]
        assert layer.values[0, 0, :, 0].tolist() == [-token for token in ids[: prefix.length]]
    return prefix.length


def store(cache: PrefixCache, ids: list[int], version: str = "") -> None:
    cache.store([Prompt(ids, version)], KvRows.of(kv(ids)))


def alone(loaded: LoadedModel, *specs: SequenceSpec) -> dict[str, list[int]]:
    """Tokens of each sequence in an engine of its own, without a cache."""
    tokens = {}
    for one in specs:
        bench = Bench(loaded, prefix_cache_bytes=0)
        bench.submit(one)
        bench.run()
        tokens[one.id] = bench.tokens(one.id)
    return tokens


def store_together(cache: PrefixCache, prompts: list[list[int]]) -> None:
    """As the batch holds them: padded on the left to the longest."""
    longest = max(len(ids) for ids in prompts)
    padding = [longest - len(ids) for ids in prompts]
    caches = [kv([-1] * pad + ids)[0] for pad, ids in zip(padding, prompts, strict=True)]
    keys, values = (mx.concatenate([getattr(one, name) for one in caches]) for name in ("keys", "values"))
    rows = KvRows([(keys, values)], list(range(len(prompts))), padding)
    cache.store([Prompt(ids, "") for ids in prompts], rows)


def test_prompts_that_came_together_are_found_each() -> None:
    cache = cache_of(64)
    prompts = [list(range(100 * n, 100 * n + length)) for n, length in enumerate((8, 21, 4, 9, 3, 16), start=1)]
    store_together(cache, prompts)
    assert [found(cache, ids) for ids in prompts] == [8, 20, 4, 8, 0, 16]


def test_equal_beginnings_that_came_together_are_stored_once() -> None:
    cache = cache_of(64)
    store_together(cache, [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8]])
    assert cache.stats.blocks == 2
    assert found(cache, [1, 2, 3, 4, 9, 9, 9, 9]) == 4


def test_a_hit_leaves_the_slab_and_the_bytes_stay_right() -> None:
    cache = cache_of(5)
    prompts = [[100 * n + i for i in range(4)] for n in range(1, 5)]
    store_together(cache, prompts)
    assert cache.stats.bytes == 4 * BLOCK_BYTES
    assert found(cache, prompts[0]) == 4
    assert cache.stats.bytes == 5 * BLOCK_BYTES, "its own copy, beside the slab of the others"
    store(cache, [7, 7, 7, 7])  # one block too many: the three cold ones go, and with them their slab
    assert (cache.stats.bytes, cache.stats.blocks) == (2 * BLOCK_BYTES, 2)
    assert (found(cache, prompts[0]), found(cache, [7, 7, 7, 7])) == (4, 4)


# -- in the engine


@pytest.mark.long
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7, "top_p": 0.9}])
def test_a_hit_gives_the_tokens_of_a_cold_run(model: LoadedModel, sampling: dict[str, float]) -> None:
    prompt = prompt_of(200)
    specs = [
        spec("cold", prompt, **sampling),
        spec("same", prompt, **sampling),
        spec("longer", [*prompt, *prompt_of(90, 1)], **sampling),
        spec("shorter", [*prompt[:130], 9], **sampling),
        spec("grown", [*prompt, *prompt_of(90, 1), 4, 5], **sampling),
    ]
    bench = Bench(model)
    for one in specs:
        bench.submit(one)
        bench.run()
    assert {one.id: bench.tokens(one.id) for one in specs} == alone(model, *specs)
    cached = {one.id: bench.finish(one.id).cached_tokens for one in specs}
    assert cached == {"cold": 0, "same": 192, "longer": 192, "shorter": 128, "grown": 256}


def test_hits_and_misses_decode_in_one_batch(llama: LoadedModel) -> None:
    shared = prompt_of(128)
    bench = Bench(llama)
    bench.submit(spec("first", [*shared, 1]))
    bench.run()
    specs = [spec(f"s{at}", [*shared[: 64 * (at % 3)], *prompt_of(5 + 13 * at, at + 1)]) for at in range(8)]
    bench.submit(*specs)
    bench.run()
    assert {one.id: bench.tokens(one.id) for one in specs} == alone(llama, *specs)
    assert [bench.finish(one.id).cached_tokens for one in specs] == [0, 64, 128, 0, 64, 128, 0, 64]


def test_an_exact_repetition_feeds_one_token(llama: LoadedModel) -> None:
    bench, prompt = Bench(llama), prompt_of(128)
    for cold in (spec("longer", [*prompt, 1], max_tokens=3), spec("cold", prompt, max_tokens=3)):
        bench.submit(cold)
        bench.run()
    spy = SpiedModel.inside(bench)
    bench.submit(spec("warm", prompt, max_tokens=3))
    bench.run()
    bench.engine.model.model = spy.inner
    assert set(spy.fed) == {1}, spy.fed
    assert bench.finish("warm").cached_tokens == 127
    assert [bench.tokens("warm")] == list(alone(llama, spec("warm", prompt, max_tokens=3)).values())


def test_a_fresh_sequence_computes_what_is_cached_and_says_the_same(llama: LoadedModel) -> None:
    bench, prompt = Bench(llama), prompt_of(128)
    for one in (spec("first", prompt), replace(spec("fresh", prompt), fresh=True, cache=False), spec("last", prompt)):
        bench.submit(one)
        bench.run()
    assert [bench.finish(name).cached_tokens for name in ("first", "fresh", "last")] == [0, 0, 127]
    assert bench.tokens("first") == bench.tokens("fresh") == bench.tokens("last")


def test_what_rows_write_behind_a_shared_prefix_stays_theirs(llama: LoadedModel) -> None:
    shared = prompt_of(64)
    specs = [spec(f"s{at}", [*shared, at, at + 1], max_tokens=24) for at in range(4)]
    expected = alone(llama, *specs)
    bench = Bench(llama)
    for one in specs:
        bench.submit(one)  # while the ones before it decode
        bench.until(lambda one=one: len(bench.tokens(one.id)) > 3)
    bench.run()
    assert {one.id: bench.tokens(one.id) for one in specs} == expected
    assert bench.engine.stats().prefix.hits == 3


def test_a_group_hits_and_leaves_its_prompt(llama: LoadedModel) -> None:
    prompt = prompt_of(150)
    bench = Bench(llama)
    for turn, cached in enumerate((0, 128)):
        group = [spec(f"g{turn}.{at}", prompt, group=f"g{turn}", temperature=1.0, seed=at) for at in range(4)]
        bench.submit(*group)
        bench.run()
        assert [bench.finish(one.id).cached_tokens for one in group] == [cached] * 4
        assert {one.id: bench.tokens(one.id) for one in group} == alone(llama, *group)


def test_a_group_begins_as_a_whole(llama: LoadedModel) -> None:
    bench = Bench(llama, prefill_rows=2)
    bench.submit(*(spec(f"g{at}", prompt_of(100)) for at in range(8)))
    bench.until(lambda: bool(bench.events))
    assert len(bench.events) == 8


def test_ids_that_are_scored_are_always_fed(llama: LoadedModel) -> None:
    prompt, text = prompt_of(130), prompt_of(70, 1)
    score = SequenceSpec("score", "m", tuple(prompt), SamplingParams(1, 0), kind="score", score_ids=tuple(text))
    report = spec("report", [*prompt, *text], prompt_logprobs=0)
    cold, warm = Bench(llama, prefix_cache_bytes=0), Bench(llama)
    warm.submit(spec("first", [*prompt, *text]))
    warm.run()
    for bench in (cold, warm):
        for one in (score, report):
            bench.submit(one)
            bench.run()
    assert warm.finish("score").cached_tokens == 129
    assert warm.finish("report").cached_tokens == 0
    assert warm.events["score"][-1].score_logprobs == pytest.approx(cold.events["score"][-1].score_logprobs, abs=1e-4)
    logprobs = [bench.events["report"][0].prompt_logprobs for bench in (warm, cold)]
    assert logprobs[0] is not None and logprobs[1] is not None
    assert logprobs[0][1:] == pytest.approx(logprobs[1][1:], abs=1e-4)


def test_a_scored_text_is_not_kept(llama: LoadedModel) -> None:
    bench = Bench(llama)
    bench.submit(
        SequenceSpec("s", "m", tuple(prompt_of(70)), SamplingParams(1, 0), kind="score", score_ids=tuple([3] * 200))
    )
    bench.run()
    assert bench.engine.stats().prefix.blocks == 1


def test_without_a_cache_nothing_is_cached(llama: LoadedModel) -> None:
    bench = Bench(llama, prefix_cache_bytes=0)
    for seq in ("a", "b"):
        bench.submit(spec(seq, prompt_of(200)))
        bench.run()
        assert bench.finish(seq).cached_tokens == 0
    prefix = bench.engine.stats().prefix
    assert (prefix.bytes, prefix.hits, prefix.misses) == (0, 0, 0)


def test_a_full_cache_stays_within_its_limit(llama: LoadedModel) -> None:
    limit = 300 * llama.card.kv_bytes_per_token
    bench = Bench(llama, prefix_cache_bytes=limit)
    for at in range(5):
        bench.submit(spec(f"s{at}", prompt_of(140, at), max_tokens=2))
        bench.run()
        prefix = bench.engine.stats().prefix
        assert prefix.bytes == prefix.blocks * 64 * llama.card.kv_bytes_per_token <= limit
    assert prefix.evicted_blocks == 6


def test_an_equal_prompt_that_comes_while_one_is_prefilled_starts_from_its_kv(llama: LoadedModel) -> None:
    bench = Bench(llama, prefill_chunk=64)
    bench.submit(spec("decoding", prompt_of(3), max_tokens=100))
    bench.until(lambda: len(bench.tokens("decoding")) > 2)
    prompt = prompt_of(500)
    bench.submit(spec("first", prompt))
    bench.turn()
    bench.submit(spec("equal", prompt))
    bench.turn()
    bench.submit(spec("alike", [*prompt[:400], *prompt_of(60, 9)]), spec("other", prompt_of(500, 7)))
    bench.turn()
    assert not bench.tokens("first"), "all came while it was being fed"
    bench.run()
    cached = {seq: bench.finish(seq).cached_tokens for seq in ("first", "equal", "alike", "other")}
    assert cached == {"first": 0, "equal": 448, "alike": 384, "other": 0}
    assert bench.tokens("equal") == bench.tokens("first")
    alone = Bench(llama, prefix_cache_bytes=0)
    alone.submit(spec("alike", [*prompt[:400], *prompt_of(60, 9)]))
    alone.run()
    assert bench.tokens("alike") == alone.tokens("alike")


def test_a_row_does_not_wait_for_a_leader_that_has_left(llama: LoadedModel) -> None:
    bench = Bench(llama, prefill_chunk=64)
    bench.submit(spec("decoding", prompt_of(3), max_tokens=100))
    bench.until(lambda: len(bench.tokens("decoding")) > 2)
    for seq in ("leader", "cancelled", "follower"):
        bench.submit(spec(seq, prompt_of(500)))
        bench.turn()
    bench.engine.cancel("cancelled")
    bench.engine.cancel("leader")
    bench.run()
    assert bench.finish("follower").reason == "length"
    assert bench.finish("follower").cached_tokens == 0


# -- adapter versions


@pytest.fixture
def adapters(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterBench]:
    made = make_versions(llama, tmp_path_factory.mktemp("adapters"))
    with AdapterBench(llama, made, between_steps_s=10.0) as bench:  # a version that has been read is loaded in one turn
        yield bench


def test_another_adapter_version_misses(adapters: AdapterBench) -> None:
    adapters.provide()
    prompt = prompt_of(100)
    for turn, cached in enumerate((0, 99)):
        for version in ("", "a@1", "a@2", "b@1"):
            adapters.submit(one := row(f"{turn} {version}", prompt, version))
            adapters.run()
            adapters.assert_true_to_its_versions(one)
            assert adapters.finish(one.id).cached_tokens == cached


def test_a_follower_hits_under_the_version_that_it_has(adapters: AdapterBench) -> None:
    prompt, cached = prompt_of(100), []
    for turn, version in enumerate(("a@1", "a@1", "a@2", "a@1")):
        adapters.publish(version)
        adapters.load(version)
        adapters.submit(one := row(f"f{turn}", prompt, "a", adapter_policy="follow"))
        adapters.run()
        adapters.assert_true_to_its_versions(one)
        cached.append(adapters.finish(one.id).cached_tokens)
    assert cached == [0, 99, 0, 99]


@pytest.mark.parametrize("rows", [1, 3])
def test_kv_of_two_versions_is_not_kept(adapters: AdapterBench, rows: int) -> None:
    """With three rows of one prompt the prefill runs in our lane."""
    adapters.publish("a@1")
    adapters.load("a@1")
    adapters.provide("b@1")
    adapters.submit(row("decoding", prompt_of(3), "b@1", max_tokens=60))
    adapters.until(lambda: len(adapters.tokens("decoding")) > 2)
    prompt = prompt_of(500)
    adapters.submit(*(row(f"f{at}", prompt, "a", adapter_policy="follow", max_tokens=4) for at in range(rows)))
    adapters.turn()
    adapters.turn()
    assert not adapters.tokens("f0")
    adapters.publish_and_read("a@2")
    adapters.turn()  # the fourth chunk of eight
    assert "a@2" in adapters.slots.stats.loaded
    assert not adapters.tokens("f0"), "the switch came while the prompt was being fed"
    adapters.run()
    for version in ("a@1", "a@2"):
        adapters.submit(one := row(version, prompt, version))
        adapters.run()
        assert adapters.finish(version).cached_tokens == 0
        adapters.assert_true_to_its_versions(one)


# -- alone


def test_blocks_that_prompts_share_are_kept_once() -> None:
    cache = cache_of(100)
    trunk = list(range(1, 13))
    store(cache, trunk)
    store(cache, [*trunk, 20, 21, 22, 23, 24])
    store(cache, [*trunk[:8], 30, 31, 32, 33])
    assert cache.stats.blocks == 5
    assert cache.stats.bytes == 5 * BLOCK_BYTES
    assert found(cache, [*trunk, 20, 21, 22, 23, 24]) == 16
    assert found(cache, [*trunk[:8], 30, 31, 32, 33]) == 12
    assert found(cache, [*trunk[:8], 30, 31, 32, 34]) == 8
    assert found(cache, trunk, "a@1") == 0
    assert found(cache, [2, *trunk[1:]]) == 0
    assert not cache.lacks(Prompt(trunk, "")) and cache.lacks(Prompt([*trunk, 5, 6, 7, 8], ""))
    assert (cache.stats.hits, cache.stats.misses, cache.stats.hit_tokens) == (3, 2, 36)


def test_the_least_recently_used_goes_first() -> None:
    cache = cache_of(3)
    prompts = [[at] * 4 for at in range(4)]
    for prompt in prompts[:3]:
        store(cache, prompt)
    assert found(cache, prompts[0]) == 4
    store(cache, prompts[3])
    assert [found(cache, prompt) for prompt in prompts] == [4, 0, 4, 4]
    assert cache.stats.evicted_blocks == 1


def test_a_prompt_larger_than_the_cache_drives_nothing_out() -> None:
    cache = cache_of(3)
    store(cache, [1] * 4)
    store(cache, [2] * 16)
    assert found(cache, [1] * 4) == 4
    assert cache.stats.evicted_blocks == 0


@pytest.mark.parametrize("other", [ChunkedKVCache(8), RotatingKVCache(8, keep=4)])
def test_of_a_kind_that_we_do_not_know_nothing_is_kept(other: object) -> None:
    cache = PrefixCache(1 << 20, 4, "base", [KVCache(), other])
    store(cache, [1] * 8)
    assert found(cache, [1] * 8) == 0
    assert cache.stats.bytes == 0 and not cache.snapshot_positions([1] * 80, "", 0)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1), max_size=6)), max_size=30))
def test_any_schedule_keeps_every_block_reachable(schedule: list[tuple[bool, list[int]]]) -> None:
    cache = cache_of(7)
    for stores, choices in schedule:
        ids = [choice for choice in choices for _ in range(4)]
        length = found(cache, ids)
        if stores:
            store(cache, ids)
            assert found(cache, ids) >= min(length, len(ids))
        assert cache.stats.bytes == cache.stats.blocks * BLOCK_BYTES <= 7 * BLOCK_BYTES
    reachable = [ids for ids in _all_prompts(6) if found(cache, ids) == len(ids)]
    assert len(reachable) == cache.stats.blocks


def _all_prompts(blocks: int) -> Iterator[list[int]]:
    for count in range(1, blocks + 1):
        for bits in range(1 << count):
            yield [bits >> at & 1 for at in range(count) for _ in range(4)]
