"""What is measured and warmed up before the first row."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.conftest import Bench, prompt_of, spec
from worker.engine.kv.prefix_cache import PrefixCache
from worker.engine.messages import EngineConfig, SpeculationConfig
from worker.engine.model.loader import LoadedModel
from worker.engine.speculation.batch import Flags, SpeculatingBatch
from worker.engine.speculation.lookup import Ids
from worker.engine.warm_up import CHUNKS, CPU_CHUNKS, largest_chunk, largest_width, prepare, rehearse, usual_rows


def forward(start_s: float, each_s: float, area_s: float = 0.0) -> Callable[[int, int], float]:
    """A machine that takes this for a start, a token, and a square token of attention."""
    return lambda rows, width: start_s + each_s * rows * width + area_s * rows * width * width


def test_the_chunk_is_what_the_bound_allows() -> None:
    assert largest_chunk(forward(0.007, 2e-6), *CHUNKS, 0.05) == 16_384, "0.6B on a GPU"
    assert largest_chunk(forward(0.01, 1.6e-5), *CHUNKS, 0.05) == 2048, "4B"
    assert largest_chunk(forward(1.0, 1e-3), *CHUNKS, 0.05) == CHUNKS[0], "never none"


def test_a_fast_enough_machine_is_asked_once() -> None:
    asked = []

    def quick(rows: int, width: int) -> float:
        asked.append(rows * width)
        return 1e-3

    assert largest_chunk(quick, *CPU_CHUNKS, 0.25) == CPU_CHUNKS[1]
    assert asked == [CPU_CHUNKS[0]]


def test_one_prompts_width_is_bounded_by_time_and_by_memory() -> None:
    assert largest_width(forward(0.007, 2e-6, 4e-9), *CHUNKS, 0.05) == 2048
    assert largest_width(lambda rows, width: float("inf") if width > 1024 else 0.0, *CHUNKS, 0.05) == 1024


def test_a_given_chunk_is_kept_and_a_cpu_decodes_nothing_before_its_first_row(llama: LoadedModel) -> None:
    config = prepare(llama, EngineConfig("", prefill_chunk=64, warm_up=True))
    assert (config.prefill_chunk, config.prefill_area) == (64, None)
    assert config.piece_s == float("inf"), "and its pieces may take their time"
    measured = prepare(llama, EngineConfig("", prefill_chunk=0))
    assert measured.prefill_chunk in (64, 128, 256, 512)
    assert measured.piece_s < 1


def test_rows_of_usual_sizes_are_decoded_and_leave_nothing_behind(llama: LoadedModel) -> None:
    assert usual_rows(128) == [1, 4, 16, 64, 128]
    assert list(rehearse(llama, EngineConfig("", max_rows=5))) == [1, 4, 5]
    bench = Bench(llama)
    assert bench.engine.stats().prefix.blocks == 0 and not bench.engine.busy


def test_each_way_to_check_drafts_is_rehearsed(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ways, fed = set(), SpeculatingBatch._fed

    def noted(self: SpeculatingBatch, ids_BL: Ids, is_fed_BL: Flags) -> mx.array:
        ways.add((*ids_BL.shape, not is_fed_BL.all(), any(self._slack)))
        return fed(self, ids_BL, is_fed_BL)

    monkeypatch.setattr(SpeculatingBatch, "_fed", noted)
    followed, ahead = [], SpeculatingBatch._check_ahead

    def counted(self: SpeculatingBatch, *of: Any) -> Any:
        followed.append(len(self._decoding_rows))
        return ahead(self, *of)

    monkeypatch.setattr(SpeculatingBatch, "_check_ahead", counted)
    assert list(rehearse(llama, EngineConfig("", max_rows=4, speculation=SpeculationConfig(3)))) == [1, 4]
    for width in (2, 3, 4):
        assert {(4, width, uneven, apart) for uneven in (True, False) for apart in (True, False)} <= ways
        assert (1, width, False, False) in ways
    assert {1, 4} <= set(followed), "before they are read"


def test_long_prompts_in_pieces_decode_as_they_do_whole(llama: LoadedModel) -> None:
    prompts = [prompt_of(700, seed) for seed in range(3)] + [prompt_of(900, 9)]
    answers = []
    for area in (None, 300 * 300):
        bench = Bench(llama, prefill_chunk=2048, prefill_area=area)
        bench.submit(*(spec(str(at), prompt) for at, prompt in enumerate(prompts)))
        bench.submit(*(spec(f"fork{at}", prompts[0]) for at in range(2)))  # in our own lane
        bench.run()
        answers.append([bench.tokens(seq) for seq in sorted(bench.events)])
    assert answers[0] == answers[1]


def test_a_late_piece_makes_the_next_ones_smaller_and_changes_no_token(llama: LoadedModel) -> None:
    def turns_and_tokens(piece_s: float) -> tuple[int, list[int]]:
        bench = Bench(llama, prefill_chunk=512, prefix_cache_bytes=0, piece_s=piece_s)
        bench.submit(spec("decodes", [5, 7, 11], max_tokens=200))
        while not bench.tokens("decodes"):
            bench.turn()
        bench.submit(spec("long", prompt_of(900, 1)))
        turns = 0
        while not bench.tokens("long"):
            bench.turn()
            turns += 1
        bench.run()
        return turns, bench.tokens("long")

    planned, tokens = turns_and_tokens(float("inf"))
    late, same = turns_and_tokens(1e-9)
    assert same == tokens
    assert late > 2 * planned


def test_a_bursts_prompts_are_kept_over_some_steps(llama: LoadedModel) -> None:
    bench, stored = Bench(llama, max_rows=8, prefill_rows=8, prefill_chunk=1024, keep_bytes=1), list[int]()
    cache = bench.engine.prefixes
    store = cache.store

    def counted(prompts: object, kv: object, **options: bool) -> None:
        stored.append(len(prompts))  # type: ignore[arg-type]
        store(prompts, kv, **options)  # type: ignore[arg-type]

    cache.store = counted  # type: ignore[method-assign,assignment]
    prompts = [prompt_of(100, seed) for seed in range(6)]
    bench.submit(*(spec(str(at), prompt) for at, prompt in enumerate(prompts)))
    bench.run()
    assert stored == [1] * 6, "one in each step, where six at once would hold the loop"
    assert isinstance(cache, PrefixCache) and cache.stats.blocks == 6
    bench.submit(*(spec(f"again{at}", prompt) for at, prompt in enumerate(prompts)))
    bench.run()
    assert [bench.tokens(f"again{at}") for at in range(6)] == [bench.tokens(str(at)) for at in range(6)]


def test_a_row_that_ends_before_its_turn_is_not_kept(llama: LoadedModel) -> None:
    bench = Bench(llama, max_rows=8, prefill_rows=8, prefill_chunk=1024, keep_bytes=1)
    bench.submit(*(spec(str(at), prompt_of(100, at), max_tokens=1) for at in range(4)))
    bench.run()
    assert bench.engine.stats().prefix.blocks == 1
