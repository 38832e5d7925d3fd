"""Who gets in, who waits, who is refused, and how rows leave before their time."""

import time
from dataclasses import replace
from functools import partial

import mlx.core as mx
import msgspec
import pytest

from mlx_model.device import on_cpu
from mlx_model.loader import LoadedModel
from mlx_model.memory import watched_memory
from shared.errors import (
    ContextLengthExceededError,
    EmptyPromptError,
    EngineError,
    InvalidRequestError,
    TokenOutOfRangeError,
    UnknownAdapterError,
)
from shared.frames import TokenEvent
from shared.machine.memory import GpuMemory
from shared.sequences import SamplingParams, SequenceSpec
from tests.engine.conftest import Bench, SpiedModel, prompt_of, spec


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (spec("s", []), EmptyPromptError),
        (spec("s", [1, 400]), TokenOutOfRangeError),
        (spec("s", [1, -1]), TokenOutOfRangeError),
        (spec("s", [1] * 1000, max_tokens=25), ContextLengthExceededError),
        (spec("s", [1], max_tokens=0), InvalidRequestError),
        (SequenceSpec("s", "m", (1,), SamplingParams(1, 0), adapter="math@1"), UnknownAdapterError),
        (
            SequenceSpec("s", "m", (1,), SamplingParams(1, 0), kind="score", score_ids=(999,)),
            TokenOutOfRangeError,
        ),
    ],
)
def test_an_impossible_sequence_ends_with_a_reason_and_harms_nobody(
    bench: Bench, bad: SequenceSpec, error: type[Exception]
) -> None:
    bench.submit(bad, spec("good", [1, 2]))
    bench.run()
    finish = bench.finish("s")
    assert (finish.reason, finish.error_code) == ("error", getattr(error, "code", None) or "")
    assert finish.error_message
    assert bench.finish("good").reason == "length"


def test_more_kv_than_the_worker_has_is_refused(llama: LoadedModel) -> None:
    bench = Bench(replace(llama, kv_limit_bytes=100 * llama.card.kv_bytes_per_token))
    bench.submit(spec("s", [1] * 90, max_tokens=11), spec("t", [1] * 90, max_tokens=10))
    bench.run()
    assert bench.finish("s").error_code == ContextLengthExceededError.code
    assert bench.finish("t").reason == "length"


def test_rows_wait_for_kv_and_for_places(llama: LoadedModel) -> None:
    bench = Bench(replace(llama, kv_limit_bytes=100 * llama.card.kv_bytes_per_token), max_rows=3)
    bench.submit(*(spec(f"s{i}", [1] * 30, max_tokens=10) for i in range(5)))
    bench.turn()
    stats = bench.engine.stats()
    assert (stats.rows, stats.waiting, stats.kv_bytes) == (2, 3, 80 * llama.card.kv_bytes_per_token)
    most = 0
    while bench.engine.busy:
        bench.turn()
        most = max(most, bench.engine.stats().rows)
    assert most == 2
    after = bench.engine.stats()
    assert (after.rows, after.waiting, after.kv_bytes, after.tokens) == (0, 0, 0, 50)


def test_a_long_row_counts_for_all_because_the_batch_is_padded_to_it(llama: LoadedModel) -> None:
    bench = Bench(replace(llama, kv_limit_bytes=100 * llama.card.kv_bytes_per_token))
    bench.submit(spec("long", [1] * 40, max_tokens=9), *(spec(f"s{i}", [1]) for i in range(3)))
    bench.turn()
    assert bench.engine.stats().rows == 2
    bench.run()
    assert bench.engine.stats().kv_bytes == 0


@pytest.mark.skipif(not on_cpu(), reason="of a CPU")
def test_memory_that_mlx_keeps_for_later_is_bounded(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr("mlx.core.set_cache_limit", limits.append)
    Bench(replace(llama, kv_limit_bytes=64 << 30))
    assert limits == [256 << 20], "of a CPU"
    monkeypatch.setattr("mlx.core.default_device", lambda: mx.Device(mx.gpu))
    for kv_limit in (64 << 30, 1 << 20):
        Bench(replace(llama, kv_limit_bytes=kv_limit))
    assert limits[1:] == [16 << 30, 256 << 20]
    Bench(replace(llama, kv_limit_bytes=64 << 30))
    for available, kept in ((100 << 30, 16 << 30), (40 << 30, 10 << 30), (1 << 20, 256 << 20)):
        monkeypatch.setattr("mlx_model.memory.gpu_memory", partial(GpuMemory, 141 << 30, available))
        watched_memory()
        assert limits[-1] == kept, "other processes take from the GPU what MLX must not keep then"


def test_a_cancelled_row_is_gone_before_the_next_token(bench: Bench) -> None:
    bench.submit(spec("s", prompt_of(5), max_tokens=500), spec("t", prompt_of(6), max_tokens=500))
    bench.until(lambda: len(bench.tokens("s")) == 3)
    bench.engine.cancel("s")
    bench.turn()
    assert bench.finish("s").reason == "cancelled"
    assert len(bench.tokens("s")) == 3
    assert bench.engine.stats().rows == 1
    bench.engine.cancel("unknown")
    bench.engine.cancel("t")
    bench.run()


def test_a_row_can_be_cancelled_wherever_it_is(llama: LoadedModel) -> None:
    bench = Bench(llama, max_rows=5, prefill_chunk=16)
    bench.submit(spec("group1", prompt_of(90), group="g"), spec("group2", prompt_of(90), group="g"))
    bench.submit(spec("scored", prompt_of(80), prompt_logprobs=1), spec("long", prompt_of(200)))
    bench.submit(spec("decoding", [1]), spec("waiting", [2]))
    bench.turn()
    bench.turn()
    for seq in ("group1", "scored", "long", "waiting"):
        bench.engine.cancel(seq)
    bench.run()
    assert {seq: bench.finish(seq).reason for seq in sorted(bench.events)} == {
        "decoding": "length",
        "group1": "cancelled",
        "group2": "length",
        "long": "cancelled",
        "scored": "cancelled",
        "waiting": "cancelled",
    }
    assert bench.engine.stats().kv_bytes == 0


def test_cancelling_flushes_the_text_that_was_held_back(bench: Bench) -> None:
    bench.submit(spec("s", prompt_of(5), max_tokens=500, stop=tuple(chr(c) * 60 for c in range(32, 127))))
    bench.until(lambda: len(bench.tokens("s")) >= 20)
    bench.engine.cancel("s")
    bench.run()
    decoded = bytes(token for token in bench.tokens("s") if token < 256).decode(errors="replace")
    assert bench.text("s") == decoded


def test_a_deadline_ends_rows_and_waiting_sequences(llama: LoadedModel) -> None:
    bench = Bench(llama, max_rows=1)
    now = time.time_ns() // 1_000_000
    bench.submit(spec("s", [1], max_tokens=900, deadline_ms=now + 100))
    bench.submit(spec("waits", [2], deadline_ms=now + 100), spec("late", [3], deadline_ms=now - 1))
    bench.submit(spec("free", [4]))
    bench.run(5000)
    assert bench.finish("s").reason == bench.finish("waits").reason == bench.finish("late").reason == "deadline"
    assert bench.tokens("s") and not bench.tokens("waits")
    assert bench.finish("free").reason == "length"


def test_the_first_token_s_deadline_ends_what_has_no_token_and_nothing_else(llama: LoadedModel) -> None:
    bench = Bench(llama, max_rows=1)
    past = time.time_ns() // 1_000_000 - 1
    begun, late = (
        msgspec.structs.replace(spec(seq, [1], max_tokens=20), first_token_deadline_ms=past)
        for seq in ("begun", "late")
    )
    bench.submit(begun, prior=(TokenEvent("begun", 1, 0, [5], [-1.0]),), attempt=2)
    bench.submit(late)
    bench.run()
    assert bench.finish("begun").reason == "length"
    assert bench.finish("late").reason == "deadline" and not bench.tokens("late")


@pytest.mark.parametrize("extra", [{}, {"prompt_logprobs": 0}, {"group": "g"}], ids=str)
def test_a_long_prompt_comes_in_chunks_while_others_keep_stepping(llama: LoadedModel, extra: dict[str, object]) -> None:
    bench = Bench(llama, prefill_chunk=32)
    spy = SpiedModel.inside(bench)
    bench.submit(spec("s", [1, 2], max_tokens=60))
    bench.until(lambda: len(bench.tokens("s")) == 5)
    spy.fed.clear()
    long = prompt_of(600)
    bench.submit(spec("l", long, **extra), *([spec("l2", long, **extra)] if "group" in extra else []))
    turns = 0
    while not bench.tokens("l"):
        before = len(bench.tokens("s"))
        bench.turn()
        turns += 1
        assert len(bench.tokens("s")) == before + 1
    assert turns >= 600 // 32
    assert max(spy.fed) <= 32


def test_a_failing_forward_ends_its_rows_and_the_engine_goes_on(bench: Bench) -> None:
    spy = SpiedModel.inside(bench)
    spy.fails = lambda tokens_BL: 99 in tokens_BL.tolist()[0]
    bench.submit(spec("bad", [1, 99, 3]), spec("beside", [1, 5, 3]))
    bench.run()
    assert bench.finish("bad").error_code == EngineError.code
    assert "out of memory" in bench.finish("bad").error_message
    assert bench.finish("beside").reason == "error"
    bench.submit(spec("bad2", [1, 99, 3], prompt_logprobs=0), spec("after", [1, 5, 3]))
    bench.run()
    assert bench.finish("bad2").error_code == EngineError.code
    assert bench.finish("after").reason == "length"
    assert bench.engine.stats().kv_bytes == 0


def test_an_engine_that_keeps_failing_gives_up(bench: Bench) -> None:
    SpiedModel.inside(bench).fails = lambda tokens_BL: True
    with pytest.raises(RuntimeError, match="out of memory"):
        for index in range(3):
            bench.submit(spec(f"s{index}", [1, 2, 3]))
            bench.run()


@pytest.mark.parametrize(
    "error",
    [
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
        "[METAL] Command buffer execution failed: Caused GPU Timeout Error",
    ],
)
def test_an_engine_whose_gpu_gives_out_ends_no_row_and_computes_nothing_more(bench: Bench, error: str) -> None:
    spy = SpiedModel.inside(bench)
    bench.submit(spec("s", [1, 2, 3]))
    bench.until(lambda: len(bench.tokens("s")) == 2)
    spy.error, spy.fails = error, lambda tokens_BL: True
    with pytest.raises(RuntimeError, match="failed"):
        bench.run()
    assert len(bench.tokens("s")) == 2
    assert bench.events["s"][-1].finish is None


def test_interactive_sequences_wait_before_batch_ones(llama: LoadedModel) -> None:
    bench = Bench(llama, max_rows=1)
    batch = [msgspec.structs.replace(spec(f"b{i}", [1]), sequence_class="batch") for i in range(3)]
    bench.submit(*batch, spec("i0", [1]))
    bench.turn()
    bench.submit(spec("i1", [1]))
    bench.run()
    assert list(bench.events) == ["i0", "i1", "b0", "b1", "b2"]


def test_a_newer_attempt_takes_the_place_of_an_older_one(bench: Bench) -> None:
    bench.submit(spec("s", [1, 2]))
    bench.turn()
    bench.turn()
    bench.events.clear()
    bench.submit(spec("s", [1, 2]), attempt=2)
    bench.run()
    assert {event.attempt for event in bench.events["s"]} == {2}
    assert len(bench.tokens("s")) == 8
