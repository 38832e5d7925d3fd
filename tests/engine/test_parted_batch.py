"""Parts of a batch that take turns and draw a turn later: tokens are those of one batch, here with one rank."""

import msgspec
import pytest

from mlx_model.loader import LoadedModel
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.kv_models import small
from tests.engine.test_ranks import sequences_of
from tests.engine.test_schedules import Schedule
from worker.engine.batch.parted_batch import PartedBatch
from worker.engine.batch.row_model import RowModel


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowModel, "stages", property(lambda self: 2))


def test_rows_in_parts_say_what_they_say_in_one(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for stages in (1, 3):
        monkeypatch.setattr(RowModel, "stages", property(lambda self, count=stages: count))
        bench = Bench(llama, max_rows=16)
        specs = [each for each in sequences_of() if not each.sampling.grammar]
        bench.submit(*specs)
        bench.turn()
        assert isinstance(bench.engine._batch, PartedBatch) == (stages > 1)
        bench.run()
        said.append({each.id: (bench.tokens(each.id), bench.finish(each.id).reason) for each in specs})
    assert said[0] == said[1]


@pytest.mark.parametrize(("name", "seed"), [("llama", 6), ("qwen3_5", 7)])
def test_whatever_the_schedule_nothing_is_left_in_any_part(
    llama: LoadedModel, name: str, seed: int, in_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = llama if name == "llama" else small(name, llama)
    schedule = Schedule(loaded, seed)
    schedule.run()
    for part in schedule.parts:
        assert not (part._inserted or part._unfed or part._groups or part._cache or part._undrawn or part._untold)
    monkeypatch.undo()
    alone = Bench(loaded, max_rows=64, prefix_cache_bytes=0, prefill_rows=1, prefill_chunk=4096)
    specs = schedule.specs.values()
    alone.submit(*(msgspec.structs.replace(each, group="", sequence_class="interactive") for each in specs))
    alone.run()
    for seq in schedule.specs:
        told = schedule.bench.tokens(seq)
        assert told == alone.tokens(seq)[: len(told)] and (told or seq in schedule.cancelled)


def test_parts_take_turns_and_rows_come_to_the_one_that_has_fewest(llama: LoadedModel, in_parts: None) -> None:
    bench = Bench(llama)
    bench.submit(*(spec(f"s{at}", prompt_of(5, at), max_tokens=40) for at in range(8)))
    bench.until(lambda: bench.engine._batch.decoding == 8)
    for _ in range(8):
        bench.turn()  # until all have been told of their first tokens
    parts = [{event.seq for event in bench.turn()} for _ in range(4)]
    assert parts[0] == parts[2] != parts[1] == parts[3] and [len(each) for each in parts] == [4] * 4


def test_what_a_row_with_states_has_written_is_kept_for_its_next_turn(llama: LoadedModel, in_parts: None) -> None:
    bench = Bench(small("qwen3_5", llama), block_size=4)
    first = spec("first", prompt_of(21, 1), max_tokens=9)
    bench.submit(first)
    bench.run()
    prompt = [*first.prompt_ids, *bench.tokens("first"), 7, 8]
    bench.submit(spec("next", prompt, max_tokens=2))
    bench.run()
    assert bench.engine.stats().prefix.hit_tokens >= 29, "of its prompt and its answer but the last tokens"
