"""What is measured and warmed up while no row is there."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import msgspec
import pytest

from mlx_model.config import EngineConfig, SpeculationConfig
from mlx_model.device import PRETENDS, on_cpu
from mlx_model.loader import LoadedModel
from tests.engine.adapter_bench import AdapterBench
from tests.engine.adapter_models import make_adapter
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.test_thread import Outbox
from tests.waiting import HANG_S, wait_until
from worker.engine import warm_up
from worker.engine.batch.row_model import RowModel
from worker.engine.between_steps import Work
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest, StepOutput
from worker.engine.orders import Submit
from worker.engine.prefixes.prefix_cache import PrefixCache
from worker.engine.speculation.batch import Flags, SpeculatingBatch
from worker.engine.speculation.lookup import Ids
from worker.engine.thread import EngineThread
from worker.engine.warm_up import (
    CHUNKS,
    CPU_CHUNKS,
    FIRST_WIDTH,
    Forward,
    WarmUp,
    begun,
    largest_chunk,
    largest_width,
    rehearse,
    usual_rows,
)

T = TypeVar("T")


def found(work: Work[T]) -> T:
    """What comes of it in the end."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def machine(seconds: Callable[[int, int], float]) -> Forward:
    """One whose forwards of so many rows of such a width take that."""

    def forward(rows: int, width: int) -> Work[float]:
        yield
        return seconds(rows, width)

    return forward


def forward(start_s: float, each_s: float, area_s: float = 0.0) -> Forward:
    """A machine that takes this for a start, a token, and a square token of attention."""
    return machine(lambda rows, width: start_s + each_s * rows * width + area_s * rows * width * width)


def test_the_chunk_is_what_the_bound_allows() -> None:
    assert found(largest_chunk(forward(0.007, 2e-6), *CHUNKS, 0.05)) == 16_384, "0.6B on a GPU"
    assert found(largest_chunk(forward(0.01, 1.6e-5), *CHUNKS, 0.05)) == 2048, "4B"
    assert found(largest_chunk(forward(1.0, 1e-3), *CHUNKS, 0.05)) == CHUNKS[0], "never none"


def test_a_fast_enough_machine_is_asked_once() -> None:
    asked = []

    def quick(rows: int, width: int) -> float:
        asked.append(rows * width)
        return 1e-3

    assert found(largest_chunk(machine(quick), *CPU_CHUNKS, 0.25)) == CPU_CHUNKS[1]
    assert asked == [CPU_CHUNKS[0]]


def test_one_prompts_width_is_bounded_by_time_and_by_memory() -> None:
    assert found(largest_width(forward(0.007, 2e-6, 4e-9), *CHUNKS, 0.05)) == 2048
    small = machine(lambda rows, width: float("inf") if width > 1024 else 0.0)
    assert found(largest_width(small, *CHUNKS, 0.05)) == 1024


def warmed(loaded: LoadedModel, config: EngineConfig) -> tuple[Engine, WarmUp]:
    config = begun(config)
    engine = Engine(loaded, config)
    return engine, WarmUp(loaded, config, engine, None)


of_cpu = pytest.mark.skipif(not on_cpu(), reason="of a CPU")


@of_cpu
def test_a_given_chunk_is_kept_and_a_cpu_decodes_nothing_before_its_first_row(llama: LoadedModel) -> None:
    engine, warm_up = warmed(llama, EngineConfig("", prefill_chunk=64, warm_up=True))
    assert warm_up.is_over
    assert (engine.pieces.chunk.tokens, engine.pieces.area) == (64, None)
    assert engine.config.piece_s == float("inf"), "and its pieces may take their time"


@of_cpu
def test_an_engine_begins_with_few_tokens_which_grow_in_time_until_they_are_measured(llama: LoadedModel) -> None:
    engine, warm_up = warmed(llama, EngineConfig("", prefill_chunk=0))
    chunk = engine.pieces.chunk
    assert (chunk.tokens, warm_up.is_over) == (CPU_CHUNKS[0], False)
    for _ in range(20):
        chunk.turn(chunk.tokens, 0.01)
    assert chunk.tokens == CPU_CHUNKS[1]
    chunk.turn(chunk.tokens, 60.0)
    assert chunk.tokens == CPU_CHUNKS[1] // 4
    pieces = 0
    while not warm_up.is_over:
        warm_up.piece()
        pieces += 1
    assert pieces >= 2, "one forward each"
    assert chunk.tokens in (64, 128, 256, 512)
    chunk.turn(1, 0.01)
    for _ in range(20):
        chunk.turn(chunk.tokens, 0.01)
    assert chunk.tokens in (64, 128, 256, 512), "it grows no further"
    engine.close()


@pytest.mark.parametrize(("head_size", "area"), [(128, None), (256, FIRST_WIDTH**2)])
def test_a_mac_measures_nothing_and_feeds_by_what_real_pieces_take(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, head_size: int, area: int | None
) -> None:
    monkeypatch.setenv(PRETENDS, "1")
    config = begun(EngineConfig("", prefill_chunk=0, warm_up=True), head_size)
    engine = Engine(llama, config)
    assert WarmUp(llama, config, engine, None).is_over
    chunk = engine.pieces.chunk
    assert (engine.pieces.area, chunk.at_once(3), chunk.at_once(0)) == (area, 256, 1024)
    for _ in range(20):
        chunk.turn(chunk.tokens, 0.01)
    assert (chunk.at_once(3), chunk.at_once(0)) == (2048, 2048)
    engine.close()


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up takes this machine for one that has kernels to compile."""
    monkeypatch.setattr(warm_up, "on_cuda", lambda: True)


class Watched:
    """The pieces of a warm-up and the tokens of rows, in the order in which they came; the first piece is held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outbox: Outbox) -> None:
        self.order: list[str] = []
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        piece, on_step = WarmUp.piece, outbox.on_step

        def held(warm_up: WarmUp) -> None:
            self.order.append("piece")
            self.begun.set()
            assert self.may_go_on.wait(HANG_S)
            piece(warm_up)

        def noted(output: StepOutput) -> None:
            self.order += ["token" for event in output.events if event.tokens]
            on_step(output)

        monkeypatch.setattr(WarmUp, "piece", held)
        outbox.on_step = noted  # type: ignore[method-assign]


@pytest.mark.usefixtures("compiles")
async def test_an_engine_is_ready_before_it_is_warm_and_a_request_waits_for_one_piece(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox()
    watched, quicken = Watched(monkeypatch, outbox), RowModel.quicken

    def noted(model: RowModel) -> None:
        watched.order.append("quick")
        quicken(model)

    monkeypatch.setattr(RowModel, "quicken", noted)
    config = EngineConfig(str(llama_folder), max_rows=4, prefill_chunk=0, warm_up=True)
    thread = EngineThread(config, outbox.on_step, outbox.on_death)
    thread.start()
    assert watched.begun.wait(HANG_S) and thread.stats().warms_up, "ready, and warming up"
    assert thread.silent_s() == 0, "nobody waits"
    thread.send(Submit([RowRequest(spec("s", prompt_of(5), max_tokens=8))]))
    assert thread.silent_s() > 0
    watched.may_go_on.set()
    outbox.wait(lambda: outbox.finished("s"))
    assert watched.order[: 1 + 8] == ["piece", *["token"] * 8], "by mlx-lm's forward"
    await wait_until(lambda: not thread.stats().warms_up)
    assert watched.order.count("piece") > 40 and outbox.death is None
    assert watched.order.count("quick") == 1
    thread.send(Submit([RowRequest(spec("again", prompt_of(5), max_tokens=8))]))
    outbox.wait(lambda: outbox.finished("again"))
    assert thread.stop()
    said = {
        seq: [token for event in outbox.events if event.seq == seq for token in event.tokens] for seq in ("s", "again")
    }
    assert said["s"] == said["again"]


@pytest.mark.usefixtures("compiles")
def test_a_worker_that_is_never_idle_gets_its_kernels_and_nothing_else_amid_its_rows(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox()
    monkeypatch.setattr(warm_up, "PATIENCE_S", 0.0)
    watched, quicken = Watched(monkeypatch, outbox), RowModel.quicken

    def noted(model: RowModel) -> None:
        watched.order.append("quick")
        quicken(model)

    monkeypatch.setattr(RowModel, "quicken", noted)
    config = EngineConfig(str(llama_folder), max_rows=4, prefill_chunk=0, warm_up=True)
    thread = EngineThread(config, outbox.on_step, outbox.on_death)
    thread.start()
    assert watched.begun.wait(HANG_S)
    for seq in ("s", "t"):
        thread.send(Submit([RowRequest(spec(seq, prompt_of(5), max_tokens=200))]))
    watched.may_go_on.set()
    outbox.wait(lambda: outbox.finished("s") and outbox.finished("t"))
    amid = watched.order[: len(watched.order) - watched.order[::-1].index("token")]
    assert amid.count("quick") == 1 and amid.count("piece") <= 4
    assert thread.stop() and outbox.death is None


@pytest.mark.usefixtures("compiles")
async def test_a_warm_up_that_fails_leaves_the_engine_serving(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(warm_up, "usual_rows", failing)
    outbox = Outbox()
    config = EngineConfig(str(llama_folder), max_rows=4, prefill_chunk=0, warm_up=True)
    thread = EngineThread(config, outbox.on_step, outbox.on_death)
    thread.start()
    await wait_until(lambda: not thread.stats().warms_up)
    thread.send(Submit([RowRequest(spec("s", prompt_of(5)))]))
    outbox.wait(lambda: outbox.finished("s"))
    assert thread.stop() and outbox.death is None


@pytest.mark.usefixtures("compiles")
def test_rows_of_adapters_are_what_they_are_without_a_warm_up(llama: LoadedModel, tmp_path: Path) -> None:
    made = {"a@1": make_adapter(llama.model, tmp_path)}

    def told(*, warms_up: bool) -> list[list[int]]:
        with AdapterBench(llama, made) as bench:
            bench.publish_and_read("a@1")
            bench.turn()
            config = begun(replace(bench.engine.config, prefill_chunk=0, warm_up=True))
            pieces = WarmUp(bench.loaded, config, bench.engine, bench.slots)
            for row, adapter in (("first", "a@1"), ("base", None), ("next", "a@1")):
                bench.submit(msgspec.structs.replace(spec(row, prompt_of(40)), adapter=adapter))
                for _ in range(3):
                    bench.turn()
                while warms_up and not pieces.is_over:  # amid rows, which is more than a worker does
                    pieces.piece()
            bench.run()
            assert bench.tokens("first") == bench.tokens("next") != bench.tokens("base")
            return [bench.tokens(row) for row in ("first", "base", "next")]

    assert told(warms_up=True) == told(warms_up=False)


def test_rows_of_usual_sizes_are_decoded_and_leave_nothing_behind(llama: LoadedModel) -> None:
    assert usual_rows(128) == [1, 4, 16, 64, 128]
    assert list(dict.fromkeys(rehearse(llama, EngineConfig("", max_rows=5)))) == [1, 4, 5]
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
    rows = rehearse(llama, EngineConfig("", max_rows=4, speculation=SpeculationConfig(3)))
    assert list(dict.fromkeys(rows)) == [1, 4]
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
