"""Snapshots of layers that cannot be cut: found where all layers have something, and dropped in order of use."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from worker.engine.prefixes.prefix_cache import PrefixCache, Prompt
from worker.engine.prefixes.slabs import KvRows
from worker.engine.prefixes.snapshots import MARGIN, SPACING, SnapshotPositions

BLOCK = 4
BLOCK_BYTES = 4 * 2 * 4 * 8  # positions x (keys and values) x fp32 x dim
STATE_BYTES = 4 * 2  # one of two floats


def plain(ids: list[int]) -> KVCache:
    """Tells of the ids that it was made from."""
    cache = KVCache()
    values = mx.repeat(mx.array(ids, mx.float32)[None, None, :, None], 8, axis=-1)
    cache.update_and_fetch(values, -values)
    return cache


def state(ids: list[int]) -> ArraysCache:
    """Tells how many ids there were, and which was the last."""
    cache = ArraysCache(1)
    cache[0] = mx.array([[float(len(ids)), float(ids[-1])]])
    return cache


def cache_of(limit: int) -> PrefixCache:
    return PrefixCache(limit, BLOCK, "base", [CacheList(ArraysCache(1), KVCache())])


def store(cache: PrefixCache, ids: list[int]) -> None:
    cache.store([Prompt(ids, "")], KvRows.of([CacheList(state(ids), plain(ids))]), at_end=True)


def found(cache: PrefixCache, ids: list[int], at_most: int | None = None) -> int:
    prefix = cache.longest(ids, "", len(ids) if at_most is None else at_most)
    for layer in prefix.kv:
        recurrent, attention = layer.caches
        assert recurrent[0].tolist() == [[prefix.length, ids[prefix.length - 1]]]
        assert attention.keys[0, 0, :, 0].tolist() == ids[: prefix.length]
        assert attention.offset == prefix.length
    return prefix.length


def test_a_hit_ends_at_the_longest_snapshot_that_fits() -> None:
    cache, ids = cache_of(1 << 20), list(range(1, 40))
    for length in (6, 8, 21, 22):
        store(cache, ids[:length])
    assert [found(cache, ids, at_most) for at_most in (39, 22, 21, 20, 8, 7, 5)] == [22, 22, 21, 8, 8, 6, 0]
    assert found(cache, [*ids[:21], 99, 98]) == 21
    assert found(cache, [*ids[:20], 99, 98]) == 8, "the blocks go further, and the states do not"
    assert (cache.stats.snapshots, cache.stats.blocks) == (4, 5)


def test_snapshots_go_before_the_blocks_that_they_need() -> None:
    cache = cache_of(4 * BLOCK_BYTES + 2 * STATE_BYTES)
    old, new = list(range(1, 9)), list(range(100, 108))
    store(cache, old)
    store(cache, new)
    assert (found(cache, old), found(cache, new)) == (8, 8)
    store(cache, [*new, 1, 2, 3, 4])  # one block too many
    assert (found(cache, old), found(cache, [*new, 1, 2, 3, 4])) == (0, 12)
    assert cache.stats.evicted_snapshots == 1 and cache.stats.evicted_blocks == 2
    cache.clear()
    assert (cache.stats.bytes, cache.stats.snapshots, cache.stats.snapshot_bytes) == (0, 0, 0)


def test_prompts_that_begin_alike_and_come_together_have_a_snapshot_each() -> None:
    cache, shared = cache_of(1 << 20), [1, 2, 3, 4]
    prompts = [[*shared, 5, 6, 7, 8], [*shared, 9, 9, 9, 9], [*shared, 5, 6, 7, 8]]
    caches = [[plain(ids), state(ids)] for ids in prompts]
    batch = [rows[0].merge(list(rows)) for rows in zip(*caches, strict=True)]
    cache = PrefixCache(1 << 20, BLOCK, "base", [KVCache(), ArraysCache(1)])
    cache.store([Prompt(ids, "") for ids in prompts], KvRows.of(batch, [0, 1, 2], [0, 0, 0]), at_end=True)
    assert (cache.stats.blocks, cache.stats.snapshots) == (3, 2)
    for ids in prompts[:2]:
        prefix = cache.longest(ids, "", 8)
        assert prefix.length == 8
        assert prefix.kv[0].keys[0, 0, :, 0].tolist() == ids
        assert prefix.kv[1][0].tolist() == [[8, ids[-1]]]


def test_without_layers_that_are_cut_keys_do_not_pile_up() -> None:
    cache = PrefixCache(1 << 12, BLOCK, "base", [ArraysCache(1)])
    for first in range(200):
        ids = [first, *range(40)]
        cache.store([Prompt(ids, "")], KvRows.of([state(ids)]), at_end=True)
    assert cache.stats.blocks <= 16
    assert cache.longest(ids, "", 41).length == 41


def test_states_that_do_not_fit_are_not_kept() -> None:
    cache = cache_of(BLOCK_BYTES)
    store(cache, list(range(1, 4)))
    store(cache, list(range(1, 40)))
    assert found(cache, list(range(1, 40))) == 3, "the larger one drives nothing out"
    assert cache.stats.bytes <= BLOCK_BYTES


@pytest.mark.parametrize("read", [3, 8, 9, 21])
def test_a_window_keeps_its_newest_positions_whatever_lies_in_the_ring(read: int) -> None:
    ids = list(range(1, read + 1))
    window = RotatingKVCache(8)
    for token in ids:
        values = mx.full((1, 1, 1, 8), float(token))
        window.update_and_fetch(values, -values)
    cache = PrefixCache(1 << 20, 2, "base", [RotatingKVCache(8)])
    for leaf in (window, window.merge([window])):
        cache.clear()
        cache.store([Prompt(ids, "")], KvRows.of([leaf]), at_end=True)
        [restored] = cache.longest([*ids, 99], "", read).kv
        assert restored.keys[0, 0, :, 0].tolist() == ids[-8:]
        assert (restored.offset, restored.max_size) == (read, 8)


# -- where


def test_a_short_prompt_stops_at_its_end_and_a_long_one_before_it() -> None:
    stops = SnapshotPositions(64, 1 << 30)
    assert stops.of(63, 0, 0) == []
    assert stops.of(200, 0, 0) == [199]
    assert stops.of(400, 0, 0) == [384]
    assert stops.of(64 * 6 + MARGIN, 0, 0) == [64 * 5], "the template's own last ids are not in it"
    assert stops.of(400, 384, 384) == []
    assert stops.of(400, 0, 128) == [128, 384]


def test_a_long_prompt_stops_now_and_then_within_its_share_of_the_cache() -> None:
    stops = SnapshotPositions(64, 1 << 30)
    assert stops.of(3000, 0, 0) == [SPACING, 2 * SPACING, 2944]
    assert stops.of(3000, SPACING, SPACING) == [2 * SPACING, 2944]
    stops.state_bytes = 100 << 20
    assert len(stops.of(32_000, 0, 0)) <= 3
