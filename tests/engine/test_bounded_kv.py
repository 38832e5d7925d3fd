"""`--max-kv-size`: rows that keep their last positions only read what mlx-lm's rotating caches hold."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from mlx_model.config import EngineConfig
from mlx_model.kv.kinds import leaves, mapped
from mlx_model.kv.layout import layout_of
from mlx_model.loader import LoadedModel, load_model
from shared.errors import SetupError
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.kv_models import BOUNDED, GROUP, WINDOW, Model, small

BLOCK = 16
TOKENS = 30


def mlx_lms_tokens(loaded: LoadedModel, bound: int, prompt: list[int]) -> list[int]:
    """What mlx-lm generates with its own rotating caches."""
    caches = make_prompt_cache(loaded.model)
    caches = mapped(caches, lambda leaf: RotatingKVCache(bound, keep=0) if type(leaf) is KVCache else leaf)
    steps = generate_step(mx.array(prompt), loaded.model, max_tokens=TOKENS, prompt_cache=caches)
    return [int(token) for token, _ in islice(steps, TOKENS)]


@pytest.mark.long
@pytest.mark.parametrize("name", [*BOUNDED, "llama last-300"])
def test_a_batch_with_joins_and_hits_writes_what_mlx_lms_rotating_caches_write(name: str, model_of: Model) -> None:
    loaded, bound = model_of(name), model_of(name).kv.bound
    bench = Bench(loaded, block_size=BLOCK, prefill_chunk=64)
    lengths = (5, bound - 10, bound, bound + 1, bound + 90, 3 * bound + 7)
    prompts = {f"s{at}": prompt_of(length, at) for at, length in enumerate(lengths)}
    prompts["again"] = [*prompts["s5"], *prompt_of(9, 70)]
    prompts["further"] = [*prompts["s4"], *prompt_of(bound, 80)]
    specs = {seq: spec(seq, prompt, max_tokens=TOKENS) for seq, prompt in prompts.items()}
    bench.submit(*(specs[seq] for seq in ("s0", "s1", "s5")))
    bench.until(lambda: len(bench.tokens("s0")) > 3)
    bench.submit(*(specs[seq] for seq in ("s2", "s3", "s4")))
    bench.until(lambda: len(bench.tokens("s4")) > 3)
    bench.submit(specs["again"], specs["further"])
    bench.run()
    for seq, prompt in prompts.items():
        assert bench.tokens(seq) == mlx_lms_tokens(loaded, bound, prompt), (seq, len(prompt))
    assert bench.finish("again").cached_tokens > len(prompts["s5"]) - 8 - BLOCK - 1
    assert bench.finish("further").cached_tokens > 0


def test_a_row_is_counted_by_what_it_keeps(llama_folder: Path) -> None:
    loaded = load_model(EngineConfig(str(llama_folder), max_kv_size=32))
    assert (loaded.card.kv, loaded.card.kv_window) == ("the last 32 positions", 32)
    token = loaded.card.kv_bytes_per_token
    bench = Bench(replace(loaded, kv_limit_bytes=100 * token))
    bench.submit(*(spec(f"s{at}", prompt_of(150, at), max_tokens=40) for at in range(4)))
    bench.turn()
    stats = bench.engine.stats()
    assert (stats.rows, stats.waiting, stats.kv_bytes) == (3, 1, 3 * 32 * token), "190 tokens each: none would fit"
    widths = set()
    while bench.engine.busy:
        bench.turn()
        batch = bench.engine._batch
        held = [*batch._cache, *(cache for group in batch._groups for cache in group.cache)]
        widths |= {leaf.keys.shape[2] for leaf in leaves(held) if getattr(leaf, "keys", None) is not None}
    assert max(widths) == 32, "nor is more held between two turns"
    assert [bench.finish(f"s{at}").reason for at in range(4)] == ["length"] * 4


def test_a_burst_of_prompts_of_all_lengths_is_not_copied_at_the_width_of_the_longest(llama_folder: Path) -> None:
    """A long and a short prompt's states in one slab would both take the long one's bytes."""
    loaded = load_model(EngineConfig(str(llama_folder), max_kv_size=64))
    token = loaded.card.kv_bytes_per_token
    bench = Bench(loaded, prefill_rows=8, prefill_chunk=1024, block_size=BLOCK, keep_bytes=150 * token)
    lengths = (20, 21, 62, 22, 23)
    bench.submit(*(spec(f"s{at}", prompt_of(length, at)) for at, length in enumerate(lengths)))
    bench.turn()
    stats = bench.engine.stats().prefix
    assert stats.snapshots > 1 and stats.snapshot_bytes <= (150 + 61) * token, "a row more than the limit, at most"


def test_a_bound_beyond_the_context_changes_nothing(llama_folder: Path) -> None:
    loaded = load_model(EngineConfig(str(llama_folder), max_kv_size=1024, max_context=100))
    assert (loaded.card.kv_window, loaded.kv.bound) == (0, 0)


def test_models_of_windows_alone_are_counted_by_them_without_a_bound(llama: LoadedModel) -> None:
    assert small("gemma3_text", llama).card.kv_window == 0, "every other layer keeps all"
    assert small("gemma3_text last-40", llama).card.kv_window == 40
    assert small("mamba2", llama).card.kv_window == 0, "it has no positions"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba2 last-24", "no layer of this model keeps more than a window or a state"),
        (f"gemma3_text last-{WINDOW - 1}", f"this model has windows of {WINDOW} positions of its own"),
    ],
)
def test_models_that_cannot_be_bounded_are_refused_by_name(name: str, reason: str, llama: LoadedModel) -> None:
    with pytest.raises(SetupError, match=f"--max-kv-size [0-9]+: {reason}"):
        small(name, llama)


def test_layers_with_an_index_over_all_positions_are_refused() -> None:
    class IndexedModel:
        """Its caches are those of DeepSeek V3.2."""

        def make_cache(self) -> list[CacheList]:
            return [CacheList(KVCache(), KVCache())]

    with pytest.raises(SetupError, match="--max-kv-size 24: a layer of this model keeps several caches of all"):
        layout_of(IndexedModel(), 0, GROUP, 24)


def test_a_bound_and_bits_exclude_each_other(llama: LoadedModel) -> None:
    with pytest.raises(SetupError, match="--max-kv-size 24 with --kv-bits 8: bounded KV cannot be quantised"):
        layout_of(llama.model, 8, GROUP, 24)


@pytest.mark.parametrize(("reads", "said"), [("all", "reads a prompt beyond the bound"), ("its own", "cannot read")])
def test_attention_that_does_not_keep_to_the_bound_is_refused(reads: str, said: str) -> None:
    class OddModel:
        """Sums what it has read."""

        layers = (None,)

        def __call__(self, tokens: mx.array, cache: list[KVCache]) -> mx.array:
            kv = tokens[:, None, :, None].astype(mx.float32) @ mx.ones((1, 5))
            keys, _ = cache[0].update_and_fetch(kv, kv)
            return mx.cumsum(keys, axis=2)[:, 0] if reads == "all" else cache[0].kept_otherwise

    with pytest.raises(SetupError, match=f"--max-kv-size 24: this model('s attention)? {said}"):
        layout_of(OddModel(), 0, GROUP, 24)
