"""Short prompts are found whole: the same tokens, by their own tenant only, within an eighth of the cache."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from mlx_model.loader import LoadedModel
from shared.sequences import SequenceSpec
from tests.engine.conftest import Bench, SpiedModel, prompt_of, spec
from tests.engine.kv_models import small
from tests.engine.test_prefix_cache import BLOCK_BYTES, kv
from worker.engine.prefixes.prefix_cache import PrefixCache, Prompt
from worker.engine.prefixes.slabs import KvRows
from worker.engine.prefixes.tails import ENTRY_BYTES, SHARE

SIZE = 4  # ids of a block
ID_BYTES = BLOCK_BYTES // SIZE


def cache_of(limit_bytes: int = 1 << 20) -> PrefixCache:
    return PrefixCache(limit_bytes, SIZE, "base", [KVCache()])


def store(cache: PrefixCache, ids: list[int], version: str = "", tenant: str | None = "one") -> None:
    cache.store([Prompt(ids, version, tenant)], KvRows.of(kv(ids)))


def found(cache: PrefixCache, ids: list[int], version: str = "", tenant: str | None = "one") -> int:
    """Length of the hit, which holds the KV of exactly these ids."""
    prefix = cache.longest(ids, version, len(ids), set() if tenant is None else {tenant})
    for layer in prefix.kv:
        assert layer.offset == prefix.length == layer.keys.shape[2]
        assert layer.keys[0, 0, :, 0].tolist() == ids[: prefix.length]
        assert layer.values[0, 0, :, 0].tolist() == [-token for token in ids[: prefix.length]]
    return prefix.length


def test_a_tail_is_found_by_exactly_its_ids_version_and_tenant() -> None:
    cache = cache_of()
    store(cache, [1, 2, 3])
    store(cache, [5, 6, 7, 8, 9, 10])
    assert [found(cache, ids) for ids in ([1, 2, 3], [1, 2, 3, 4, 5, 6])] == [3, 3]
    assert [found(cache, ids) for ids in ([1, 2], [1, 2, 4], [2, 3], [0, 1, 2, 3])] == [0, 0, 0, 0]
    assert [found(cache, ids) for ids in ([5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 11], [9, 10])] == [6, 4, 0]
    assert found(cache, [1, 2, 3], "a@1") == 0
    assert [found(cache, [1, 2, 3], tenant=tenant) for tenant in ("two", "", None)] == [0, 0, 0]
    assert found(cache, [5, 6, 7, 8, 9, 10], tenant="two") == 4, "blocks are everybody's"


def test_the_longest_tail_is_taken_and_never_more_than_was_asked_for() -> None:
    cache = cache_of()
    for length in (1, 3, 2):
        store(cache, [1, 2, 3][:length])
    assert found(cache, [1, 2, 3, 4]) == 3
    assert found(cache, [1, 2, 9]) == 2
    assert cache.longest([1, 2, 3, 4], "", 2, {"one"}).length == 2


def test_only_tails_that_are_a_good_part_of_their_prompt_are_kept() -> None:
    cache = cache_of()
    long, short = list(range(1, 20)), list(range(30, 40))
    store(cache, long[:9])
    store(cache, long)  # three ids of nineteen
    store(cache, short, tenant=None)  # not a whole prompt
    assert (cache.stats.tails, cache.stats.blocks) == (0, 6)
    assert not cache.lacks(Prompt(long, "", "one")) and cache.lacks(Prompt(short[:7], "", "one"))


def test_tails_stay_within_their_share_and_drive_out_no_block() -> None:
    room = 8  # tails of three ids
    cache = cache_of(SHARE * room * (3 * ID_BYTES + ENTRY_BYTES))
    store(cache, [7, 7, 7, 7])
    for at in range(10, 60):
        store(cache, [at, at, at])
        assert found(cache, [10, 10, 10]) == 3, "used all the time"
        assert cache.stats.tails <= room
        assert cache.stats.bytes == BLOCK_BYTES + cache.stats.tails * 3 * ID_BYTES
    assert (found(cache, [59, 59, 59]), found(cache, [11, 11, 11]), found(cache, [7, 7, 7, 7])) == (3, 0, 4)
    cache.clear()
    assert (cache.stats.bytes, cache.stats.tails) == (0, 0)
    assert found(cache, [10, 10, 10]) == 0
    assert not cache._tails._lengths, "nothing is left of what has gone"


def test_a_tail_is_not_found_without_the_blocks_before_it() -> None:
    cache = cache_of(64 * BLOCK_BYTES)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    store(cache, prompt)
    for at in range(100, 180):
        store(cache, [at] * 4)
    assert cache.stats.tails == 1 and found(cache, prompt) == 0
    store(cache, prompt)
    assert found(cache, prompt) == 7


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=7), st.sampled_from(["a", "b"])), max_size=30)
)
@settings(deadline=None)
def test_whatever_is_stored_hits_hold_the_kv_of_their_ids(prompts: list[tuple[list[int], str]]) -> None:
    cache = cache_of(SHARE * 4 * (3 * ID_BYTES + ENTRY_BYTES))
    for ids, tenant in prompts:
        store(cache, ids, tenant=tenant)
        assert found(cache, ids, tenant=tenant) >= len(ids) // SIZE * SIZE
        found(cache, [*ids, 1, 2], tenant="b")
        assert (
            cache.stats.bytes - cache.stats.blocks * BLOCK_BYTES + cache.stats.tails * ENTRY_BYTES
            <= cache.limit_bytes // SHARE
        )


# -- in the engine


@pytest.mark.parametrize("name", ["llama", "llama 8", "deepseek_v3"])
def test_a_short_prompt_that_comes_again_feeds_one_token(name: str, llama: LoadedModel) -> None:
    loaded = llama if name == "llama" else small(name, llama)
    bench, prompt = Bench(loaded), prompt_of(17)
    drawn = {"temperature": 1.0, "max_tokens": 6}
    group = [spec(f"cold{at}", prompt, group="g", seed=at, **drawn) for at in range(3)]
    bench.submit(*group)
    bench.run()
    spy = SpiedModel.inside(bench)
    bench.submit(*(spec(f"warm{at}", prompt, group="h", seed=at, **drawn) for at in range(3)), spec("one", prompt))
    bench.run()
    bench.engine.model.model = spy.inner
    assert max(spy.fed) <= 4, "a token of each row"
    for at in range(3):
        assert bench.tokens(f"warm{at}") == bench.tokens(f"cold{at}")
        assert (bench.finish(f"cold{at}").cached_tokens, bench.finish(f"warm{at}").cached_tokens) == (0, 16)


def test_several_tenants_find_what_each_of_them_would_find() -> None:
    cache = cache_of()
    store(cache, [1, 2, 3], tenant="one")
    store(cache, [1, 2, 3], tenant="other")
    store(cache, [1], tenant="third")
    lengths = [cache.longest([1, 2, 3, 9], "", 4, set(each)).length for each in (["one", "other"], ["one", "third"])]
    assert lengths == [3, 1] and cache.longest([1, 2, 3, 9], "", 4, {"one", "fourth"}).length == 0


def test_rows_of_several_tenants_find_tails_that_each_of_them_has(llama: LoadedModel) -> None:
    def of(tenant: str, seq: str) -> SequenceSpec:
        return msgspec.structs.replace(spec(seq, prompt), tenant=tenant)

    bench, prompt = Bench(llama), prompt_of(17)
    bench.submit(of("one", "first"))
    bench.run()
    bench.submit(of("two", "another's"))
    bench.run()
    bench.engine.clear_cache(rows=False)
    bench.submit(of("one", "again"))
    bench.run()
    bench.submit(of("one", "beside"), of("two", "together"))
    bench.run()
    bench.submit(of("one", "last"), of("two", "last, too"))
    bench.run()
    cached = {seq: bench.finish(seq).cached_tokens for seq in bench.events}
    assert cached == {"first": 0, "another's": 0, "again": 0, "beside": 0, "together": 0, "last": 16, "last, too": 16}
    assert len({tuple(bench.tokens(seq)) for seq in bench.events}) == 1
