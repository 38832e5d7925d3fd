"""KV on disk: found again after a restart, in every kind of model, and never where it is not exactly what is wanted."""

import importlib.metadata
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_model.config import DiskConfig, SpeculationConfig
from mlx_model.loader import LoadedModel
from shared.sequences import SequenceSpec
from tests.engine.adapter_bench import AdapterBench, make_versions, row
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.kv_models import Model
from worker.engine.prefixes.disk import folder, tiered_cache, writing

BLOCK = 16
KINDS = ("llama", "deepseek_v3", "gemma3_text", "qwen3_5", "lfm2", "mamba2")


def bench_of(
    loaded: LoadedModel, place: Path | None, *, disk: dict[str, object] | None = None, **config: object
) -> Bench:
    tier = None if place is None else replace(DiskConfig(str(place)), **(disk or {}))
    return Bench(loaded, **{"block_size": BLOCK, "prefill_chunk": 128, "disk": tier} | config)


def run(bench: Bench, *specs: SequenceSpec) -> None:
    for one in specs:
        bench.submit(one)
        bench.run()


def cold_tokens(loaded: LoadedModel, one: SequenceSpec) -> list[int]:
    bench = bench_of(loaded, None, prefix_cache_bytes=0)
    run(bench, one)
    return bench.tokens(one.id)


def cached(bench: Bench, seq: str) -> int:
    return bench.finish(seq).cached_tokens


def files(place: Path) -> list[Path]:
    return sorted(place.glob("*/*.safetensors"))


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_second_turn_after_a_restart_goes_on_from_disk(name: str, model_of: Model, tmp_path: Path) -> None:
    loaded = model_of(name)
    before = bench_of(loaded, tmp_path)
    run(before, one := spec("one", prompt_of(150)))
    in_memory = bench_of(loaded, None)
    history = [*one.prompt_ids, *before.tokens("one")]
    two = spec("two", [*history, *prompt_of(20, 1)])
    run(in_memory, one, two)
    before.engine.close(keep=True)
    after = bench_of(loaded, tmp_path)
    run(after, two)
    assert cached(after, "two") == cached(in_memory, "two") > 100
    assert after.tokens("two") == cold_tokens(loaded, two)
    stats = after.engine.stats().disk
    assert (stats.hits, stats.errors, stats.dropped) == (1, 0, 0) and stats.hit_tokens >= cached(after, "two")


def test_where_computing_is_quicker_nothing_is_read_for_a_while(
    llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered_cache, "LOSS_S", -1e9)  # every disk is slower than this
    before = bench_of(llama, tmp_path)
    first = [spec(f"first {at}", prompt_of(150, at)) for at in range(tiered_cache.LOSSES + 1)]
    run(before, *first)
    before.engine.close(keep=True)
    after = bench_of(llama, tmp_path)
    run(after, spec("new", prompt_of(150, 99)))  # so that it knows what computing takes
    second = [spec(f"second {at}", [*each.prompt_ids, 7]) for at, each in enumerate(first)]
    run(after, *second)
    assert [cached(after, each.id) > 100 for each in second] == [True] * tiered_cache.LOSSES + [False]
    assert after.tokens(second[-1].id) == cold_tokens(llama, second[-1])


# -- any schedule

ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from([10, 40, 70]), st.integers(1, 3)),
    st.tuples(st.just("go on"), st.integers(0, 9), st.integers(4, 5)),
    st.tuples(st.just("leave"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("turn"), st.integers(1, 6), st.just(0)),
    st.tuples(st.just("restart"), st.just(0), st.sampled_from([0, 1])),
)
COLD: dict[tuple[str, tuple[int, ...]], list[int]] = {}


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2"])
@settings(max_examples=6)
@given(schedule=st.lists(ACTIONS, min_size=8, max_size=20), through=st.booleans())
def test_any_schedule_with_restarts_gives_the_tokens_of_cold_runs(
    name: str, model_of: Model, schedule: list[tuple[str, int, int]], through: bool
) -> None:
    loaded = model_of(name)
    specs: list[SequenceSpec] = []
    left: dict[str, bool] = {}
    with TemporaryDirectory() as place:
        tier = {"write_through": through, "max_bytes": 200_000}
        benches = [bench_of(loaded, Path(place), disk=tier, prefill_chunk=32, prefix_cache_bytes=16 << 10)]

        def ask(prompt: list[int]) -> None:
            specs.append(spec(f"s{len(specs)}", prompt, max_tokens=5))
            benches[-1].submit(specs[-1])

        def tokens(seq: str) -> list[int]:
            return next((bench.tokens(seq) for bench in benches if seq in bench.events), [])

        for action, number, seed in schedule:
            if action == "turn":
                for _ in range(number):
                    benches[-1].turn()
            elif action == "ask":
                ask([*prompt_of(number), *prompt_of(3 + 13 * seed, seed)])
            elif action == "restart":
                benches[-1].run()
                benches[-1].engine.close(keep=bool(seed))
                benches.append(bench_of(loaded, Path(place), disk=tier, prefill_chunk=32, prefix_cache_bytes=16 << 10))
            elif specs and action == "leave":
                left[specs[number % len(specs)].id] = True
                benches[-1].engine.cancel(specs[number % len(specs)].id)
            elif specs:
                before = specs[number % len(specs)]
                if len(before.prompt_ids) < 200 and tokens(before.id):
                    ask([*before.prompt_ids, *tokens(before.id), *prompt_of(5, seed)])
        benches[-1].run()
        for one in specs:
            if (name, one.prompt_ids) not in COLD:
                COLD[name, one.prompt_ids] = cold_tokens(loaded, one)
            assert tokens(one.id) == COLD[name, one.prompt_ids][: len(tokens(one.id))]
            assert len(tokens(one.id)) == 5 or one.id in left
        stats = benches[-1].engine.stats()
        assert stats.disk.errors == 0 and stats.prefix.bytes <= 16 << 10
        assert sum(path.stat().st_size for path in Path(place).rglob("*") if path.is_file()) <= 200_000


# -- when


def test_what_memory_has_no_room_for_comes_back_from_disk(model_of: Model, tmp_path: Path) -> None:
    loaded = model_of("llama")
    bench = bench_of(loaded, tmp_path, prefix_cache_bytes=60 << 10)  # of one prompt
    one, other = spec("one", prompt_of(200)), spec("other", prompt_of(200, 1))
    run(bench, one, other)
    assert files(tmp_path)
    run(bench, again := spec("again", [*one.prompt_ids, 7]))
    assert 96 <= cached(bench, "again") < 192, "half of what memory holds may wait to be written: the beginning"
    assert bench.tokens("again") == cold_tokens(loaded, again)
    run(bench, spec("other again", [*other.prompt_ids, 7]), spec("and again", [*one.prompt_ids, 7]))
    assert cached(bench, "and again") >= 96
    before = bench.engine.stats().disk.written_bytes
    for at in range(4):
        run(bench, spec(f"o{at}", list(other.prompt_ids)), spec(f"1{at}", list(one.prompt_ids)))
    assert bench.engine.stats().disk.written_bytes == before, "what is on disk is not written again"


def test_write_through_survives_a_kill_and_evict_only_keeps_at_the_end(model_of: Model, tmp_path: Path) -> None:
    loaded = model_of("lfm2")
    for policy, place in ((True, tmp_path / "through"), (False, tmp_path / "evicted")):
        killed = bench_of(loaded, place, disk={"write_through": policy})
        run(killed, one := spec("one", prompt_of(150)))
        after = bench_of(loaded, place)
        run(after, spec("again", [*one.prompt_ids, 5]))
        assert (cached(after, "again") > 100) == policy


def test_nothing_that_was_to_be_forgotten_comes_back(model_of: Model, tmp_path: Path) -> None:
    loaded = model_of("llama")
    bench = bench_of(loaded, tmp_path, disk={"write_through": True})
    run(bench, one := spec("one", prompt_of(150)))
    assert files(tmp_path)
    bench.engine.clear_cache(rows=False)
    assert not files(tmp_path)
    run(bench, spec("again", list(one.prompt_ids)))
    assert cached(bench, "again") == 0


def test_more_than_may_wait_is_dropped_and_counted(model_of: Model, tmp_path: Path) -> None:
    bench = bench_of(model_of("lfm2"), tmp_path, disk={"write_through": True, "queue_size": 1})
    run(bench, one := spec("one", prompt_of(400)))
    assert bench.engine.stats().disk.dropped > 0
    assert bench.tokens("one") == cold_tokens(bench.loaded, one)


def test_prompts_that_are_scored_wait_for_no_file(model_of: Model, tmp_path: Path) -> None:
    loaded = model_of("llama")
    before = bench_of(loaded, tmp_path)
    run(before, one := spec("one", prompt_of(150)))
    before.engine.close(keep=True)
    after = bench_of(loaded, tmp_path)
    run(after, spec("told", list(one.prompt_ids), prompt_logprobs=0))
    assert after.engine.stats().disk.hits == 0
    assert after.tokens("told") == before.tokens("one")


# -- files that are of no use


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flipped bit in an array":
        data[-3] ^= 4
    elif how == "flipped bit in a key":
        data[data.index(b"keys") + 20] ^= 1
    elif how == "cut short":
        data = data[: len(data) // 2]
    elif how == "empty":
        data = bytearray()
    else:
        data[:8] = b"\xff" * 8
    path.write_bytes(data)


@pytest.mark.long
@pytest.mark.parametrize(
    "how", ["flipped bit in an array", "flipped bit in a key", "cut short", "empty", "overwritten header"]
)
@pytest.mark.parametrize("known", [False, True], ids=["before the start", "while it runs"])
def test_a_damaged_file_is_removed_and_costs_nothing_but_time(
    how: str, known: bool, model_of: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = model_of("lfm2")
    before = bench_of(loaded, tmp_path)
    run(before, one := spec("one", prompt_of(150)))
    before.engine.close(keep=True)
    after = bench_of(loaded, tmp_path) if known else None
    for path in files(tmp_path):
        damage(path, how)
    damaged = files(tmp_path)
    after = after or bench_of(loaded, tmp_path)
    run(after, two := spec("two", [*one.prompt_ids, 5]))
    assert after.tokens("two") == cold_tokens(loaded, two)
    assert cached(after, "two") == 0
    assert after.engine.stats().disk.errors >= 1
    told = [record.message for record in caplog.records if "kv.disk_file_removed" in record.message]
    assert 1 <= len(told) <= len(damaged)
    after.engine.close(keep=True)
    run(bench_of(loaded, tmp_path), spec("healed", list(two.prompt_ids)))


def test_files_of_another_model_dtype_or_release_are_not_used(
    model_of: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = model_of("llama")
    before = bench_of(loaded, tmp_path)
    run(before, one := spec("one", prompt_of(150)))
    before.engine.close(keep=True)

    def found(other: LoadedModel, **config: object) -> int:
        bench = bench_of(other, tmp_path, **config)
        run(bench, spec("again", list(one.prompt_ids)))
        bench.engine.close(keep=False)
        return cached(bench, "again")

    assert found(loaded) == 144
    assert found(replace(loaded, card=msgspec.structs.replace(loaded.card, base_sha256="another"))) == 0
    assert found(loaded) == 144, "another model's files are nobody's business"
    assert found(loaded, block_size=32) == 0
    assert not files(tmp_path), "of this model, and nobody computes so any more"
    again = bench_of(loaded, tmp_path)
    run(again, one)
    again.engine.close(keep=True)
    assert found(loaded) == 144
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99")
    assert found(loaded) == 0
    assert not files(tmp_path)


# -- an operator's bad day


@pytest.fixture(autouse=True)
def seen_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def troubles(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_without_a_folder_that_can_be_used_all_goes_on(
    model_of: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = model_of("llama")
    (tmp_path / "file").write_text("no folder")
    bench = bench_of(loaded, tmp_path / "file", disk={"write_through": True})
    for at in range(5):
        run(bench, one := spec(f"s{at}", prompt_of(146, at)))  # its answer ends in the same block
        assert bench.tokens(one.id) == cold_tokens(loaded, one)
    stats = bench.engine.stats().disk
    assert stats.errors >= 1 and stats.dropped == 5
    assert len(troubles(caplog)) == 2, "once at the start, once at the first write"
    assert all("File exists" in each or "Not a directory" in each for each in troubles(caplog))


def test_a_folder_that_is_removed_while_we_run_is_made_again(
    model_of: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, place = model_of("lfm2"), tmp_path / "kv"
    bench = bench_of(loaded, place, disk={"write_through": True}, prefix_cache_bytes=24 << 10)
    run(bench, one := spec("one", prompt_of(150)))
    shutil.rmtree(place)
    specs = [spec(f"s{at}", [*one.prompt_ids, *prompt_of(40, at)]) for at in range(3)]
    run(bench, *specs)
    assert [bench.tokens(each.id) for each in specs] == [cold_tokens(loaded, each) for each in specs]
    assert files(place), "written again"
    assert len(troubles(caplog)) == 1
    bench.engine.close(keep=True)
    after = bench_of(loaded, place)
    run(after, specs[-1])
    assert cached(after, "s2") > 100


@pytest.mark.parametrize("durable", [False, True])
def test_a_full_disk_is_told_of_once_and_left_alone(
    durable: bool, model_of: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "RETRY_S", 0.0)
    loaded = model_of("llama")
    bench = bench_of(loaded, tmp_path, disk={"write_through": True, "durable": durable})
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(folder, "_write", lambda file, data: os.write(full, data))
    for at in range(4):
        run(bench, one := spec(f"s{at}", prompt_of(146, at)))
        assert bench.tokens(one.id) == cold_tokens(loaded, one)
    os.close(full)
    stats = bench.engine.stats().disk
    assert (stats.dropped, stats.errors, stats.files) == (4, 4 if durable else 1, 0)
    assert len(troubles(caplog)) == 1 and "No space left" in troubles(caplog)[0]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".lock", ".in-use"]


# -- adapters


@pytest.mark.long
def test_kv_of_lasting_versions_alone_is_kept_and_only_for_their_own_weights(
    llama: LoadedModel, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = make_versions(llama, tmp_path_factory.mktemp("adapters"))
    tier = DiskConfig(str(tmp_path), write_through=True)
    prompt = prompt_of(150)

    def tokens_and_cached(lasting: dict[str, str], version: str) -> tuple[list[int], int]:
        with AdapterBench(llama, made, block_size=BLOCK, disk=tier) as bench:
            bench.provide()
            bench.engine.prefixes.last(lasting)
            bench.submit(row("one", prompt, version))
            bench.run()
            return bench.tokens("one"), cached(bench, "one")

    first, *_ = made
    cold, _ = tokens_and_cached({}, first)
    assert tokens_and_cached({first: "weights"}, first) == (cold, 0), "it did not last when it was computed"
    assert tokens_and_cached({first: "weights"}, first) == (cold, 144)
    assert tokens_and_cached({}, first) == (cold, 0)
    assert tokens_and_cached({first: "others"}, first) == (cold, 0), "another ring's version of this name"
    assert tokens_and_cached({first: "others"}, first) == (cold, 144)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_what_is_not_to_be_cached_is_stored_nowhere(name: str, model_of: Model, tmp_path: Path) -> None:
    """Equal prompts, a group, and a row that is set aside, as each of them leaves KV otherwise."""
    loaded = model_of(name)
    from_others = SpeculationConfig(5, adapts_to_rows=False, adapts_to_time=False, memory_bytes=1 << 20, own_text=False)
    bench = bench_of(loaded, tmp_path, disk={"write_through": True}, speculation=from_others)
    rows = [spec(f"one{at}", prompt_of(150)) for at in range(2)] + [spec("two", prompt_of(150, 1))]
    rows += [msgspec.structs.replace(spec(f"three{at}", prompt_of(150, 2)), group="g") for at in range(2)]
    bench.submit(*(msgspec.structs.replace(one, cache=False) for one in rows))
    bench.until(lambda: bool(bench.tokens("two")))
    bench.engine.set_aside(["two"])
    bench.turn()
    bench.submit(msgspec.structs.replace(rows[2], cache=False), prior=tuple(bench.events.pop("two")), attempt=2)
    bench.run()
    stats = bench.engine.stats()
    assert (stats.prefix.bytes, stats.prefix.blocks, stats.prefix.snapshots, stats.prefix.tails) == (0, 0, 0, 0)
    assert [cached(bench, row.id) for row in rows] == [0] * 5
    bench.submit(normal := spec("normal", prompt_of(150, 1)))
    bench.run()
    assert cached(bench, "normal") == 0
    assert bench.engine.stats().speculation.drafted == 0, "nor is it drafted from"
    bench.submit(msgspec.structs.replace(normal, id="reader", cache=False))
    bench.run()
    assert cached(bench, "reader") >= 128, "what others have stored may be read"
    bench.engine.close(keep=True)
    known = len(files(tmp_path))
    assert known > 0
    again = bench_of(loaded, tmp_path)
    run(again, spec("later", prompt_of(150)), spec("later too", prompt_of(150, 2)))
    assert (cached(again, "later"), cached(again, "later too")) == (0, 0)
