"""Rows of the base and of several adapter versions in one batch; versions that arrive while they decode."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_model.loader import LoadedModel
from shared.errors import AdapterRejectedError, InvalidRequestError, UnknownAdapterError
from shared.sequences import SequenceSpec
from tests.engine.adapter_bench import AdapterBench, make_versions, row
from tests.engine.adapter_models import MadeAdapter
from tests.engine.conftest import prompt_of

Made = dict[str, MadeAdapter]


@pytest.fixture(scope="session")
def made(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_versions(llama, tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def bench(llama: LoadedModel, made: Made) -> Iterator[AdapterBench]:
    with AdapterBench(llama, made) as bench:
        yield bench


def test_base_and_several_versions_share_a_batch(bench: AdapterBench) -> None:
    bench.provide()
    bench.publish("a@2")
    specs = [
        row(f"s{at}", prompt_of(5 + at, at), ref)
        for at, ref in enumerate(["", "a@1", "b@2", "a", "", "a@1", "b@1", "a@2"])
    ]
    bench.submit(*specs)
    bench.run()
    for spec in specs:
        bench.assert_true_to_its_versions(spec)
    prompt = specs[1].prompt_ids
    runs = {tuple(bench.expected(prompt, version, 12)) for version in ("", *bench.made)}
    assert len(runs) == 7, "the adapters are strong enough to tell them apart"
    assert bench.versions("s3") == ["a@2"] * 12, "a name alone is its latest version"
    bench.assert_nothing_is_held()


def test_followers_switch_in_mid_sequence_and_pinned_rows_stay(bench: AdapterBench) -> None:
    bench.provide("a@1", "b@1")
    bench.publish("a@1")
    pinned = [row("p0", prompt_of(6), "a@1", max_tokens=40), row("p1", prompt_of(9, 3), "a", max_tokens=40)]
    others = [row("base", prompt_of(7, 1), max_tokens=40), row("b", prompt_of(8, 2), "b@1", max_tokens=40)]
    followers = [row(f"f{at}", prompt_of(6 + at, at), "a", adapter_policy="follow", max_tokens=40) for at in range(3)]
    bench.submit(*pinned, *others, *followers)
    bench.until(lambda: len(bench.tokens("f0")) >= 8)
    bench.publish_and_read("a@2")
    bench.load("a@2")
    bench.submit(late := row("late", prompt_of(4), "a", adapter_policy="follow"))
    bench.run()
    for spec in (*pinned, *others, *followers, late):
        bench.assert_true_to_its_versions(spec)
    assert set(bench.versions("p0")) == set(bench.versions("p1")) == {"a@1"}
    assert all(bench.versions(spec.id)[-1] == "a@2" for spec in followers)
    assert bench.versions("f0")[0] == "a@1"
    assert set(bench.versions("late")) == {"a@2"}
    bench.assert_nothing_is_held()


def test_a_rollback_moves_followers_back(bench: AdapterBench) -> None:
    bench.publish("a@1")
    bench.submit(spec := row("f", prompt_of(6), "a", adapter_policy="follow", max_tokens=60))
    bench.until(lambda: len(bench.tokens("f")) >= 5)
    bench.publish_and_read("a@2")
    bench.until(lambda: "a@2" in bench.versions("f"))
    bench.publish("a@1")
    bench.run()
    assert list(dict.fromkeys(bench.versions("f"))) == ["a@1", "a@2"]
    assert bench.versions("f")[-1] == "a@1"
    bench.assert_true_to_its_versions(spec)


@pytest.mark.parametrize("shared", [False, True])
def test_recompute_computes_the_context_again_under_the_new_version(bench: AdapterBench, shared: bool) -> None:
    bench.publish("a@1")
    specs = [
        row(f"r{at}", prompt_of(30, 0 if shared else at), "a", adapter_policy="follow", kv_on_swap=kv, max_tokens=30)
        for at, kv in enumerate(["recompute", "keep", "recompute"])
    ]
    bench.submit(*specs, row("base", prompt_of(5), max_tokens=30))
    bench.until(lambda: len(bench.tokens("r0")) >= 6)
    bench.publish_and_read("a@2")
    bench.run()
    for spec in specs:
        assert set(bench.versions(spec.id)) == {"a@1", "a@2"}
        bench.assert_true_to_its_versions(spec)
    bench.assert_nothing_is_held()


def test_more_adapters_than_slots_wait_and_never_fail(llama: LoadedModel, made: Made) -> None:
    with AdapterBench(llama, made, slots=1) as bench:
        bench.provide()
        specs = [row(f"s{at}", prompt_of(5, at), version) for at, version in enumerate([*made, *made])]
        base = row("base", prompt_of(5), max_tokens=4)
        bench.submit(*specs, base)
        bench.until(lambda: len(bench.tokens("base")) == 4)
        assert sum(not bench.tokens(spec.id) for spec in specs) >= 8, "the base does not wait behind them"
        bench.run()
        for spec in specs:
            bench.assert_true_to_its_versions(spec)
            assert set(bench.versions(spec.id)) == {spec.adapter}
        bench.assert_nothing_is_held()


def test_followers_with_one_slot_keep_their_version_and_the_next_rows_get_the_new_one(
    llama: LoadedModel, made: Made
) -> None:
    with AdapterBench(llama, made, slots=1) as bench:
        bench.publish("a@1")
        bench.submit(row("f0", prompt_of(5), "a", adapter_policy="follow"))
        bench.until(lambda: len(bench.tokens("f0")) >= 3)
        bench.publish("a@2")
        bench.submit(row("f1", prompt_of(5), "a", adapter_policy="follow"))
        bench.run()
        assert set(bench.versions("f0")) == {"a@1"}
        assert set(bench.versions("f1")) == {"a@2"}


def test_equal_prompts_share_a_prefill_only_under_one_version(bench: AdapterBench) -> None:
    bench.publish("a@1")
    bench.provide("a@2")
    prompt = prompt_of(40)
    specs = [row(f"s{at}", prompt, ref) for at, ref in enumerate(["", "a@1", "a@1", "a@2", "", "a@2", "a"])]
    bench.submit(*specs)
    bench.run()
    for spec in specs:
        bench.assert_true_to_its_versions(spec)


@pytest.mark.parametrize(
    ("ref", "code"),
    [
        ("nobody", UnknownAdapterError.code),
        ("a@9", UnknownAdapterError.code),
        ("a@1:0.5,a@2:0.5", InvalidRequestError.code),
        ("no good name", InvalidRequestError.code),
        ("b@1", AdapterRejectedError.code),
        ("b", AdapterRejectedError.code),
    ],
)
def test_what_cannot_be_served_ends_with_a_reason(bench: AdapterBench, ref: str, code: str) -> None:
    bench.provide("a@1")
    broken = bench.made["b@1"]
    bench.slots.provide(broken.path, msgspec.structs.replace(broken.manifest, rank=1000))
    bench.slots.point("b", 1)
    bench.submit(row("bad", prompt_of(4), ref), row("good", prompt_of(4), "a@1"))
    bench.run()
    assert (bench.finish("bad").reason, bench.finish("bad").error_code) == ("error", code or "")
    assert bench.finish("good").reason == "length"
    bench.assert_nothing_is_held()


def test_a_bad_new_version_leaves_followers_on_the_old_one(bench: AdapterBench, tmp_path: Path) -> None:
    bench.publish("a@1")
    bench.submit(spec := row("f", prompt_of(6), "a", adapter_policy="follow", max_tokens=30))
    bench.until(lambda: len(bench.tokens("f")) >= 3)
    (tmp_path / "torn.safetensors").write_bytes(b"no such file")
    bench.slots.provide(tmp_path / "torn.safetensors", bench.made["a@2"].manifest)
    bench.slots.point("a", 2)
    bench.until(lambda: "a@2" in bench.slots.stats.failed)
    bench.submit(row("new", prompt_of(6), "a", adapter_policy="follow"))
    bench.run()
    assert set(bench.versions("f")) == set(bench.versions("new")) == {"a@1"}
    bench.assert_true_to_its_versions(spec)


REFS = ["", "a@1", "a@2", "b@1", "b@2", "b@3", "a", "b"]
OPERATIONS = st.one_of(
    st.tuples(
        st.just("insert"),
        st.sampled_from(REFS),
        st.sampled_from(["pin", "follow"]),
        st.sampled_from(["keep", "recompute"]),
        st.integers(1, 14),
    ),
    st.tuples(st.just("publish"), st.sampled_from(["a@1", "a@2", "a@3", "b@1", "b@2", "b@3"])),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("turns"), st.integers(1, 9)),
)


@pytest.mark.long
@settings(max_examples=12, suppress_health_check=list(HealthCheck), derandomize=True)
@given(slots=st.integers(1, 3), operations=st.lists(OPERATIONS, min_size=6, max_size=24))
def test_any_schedule_keeps_every_row_true_to_its_versions(
    llama: LoadedModel, made: Made, slots: int, operations: list[tuple[Any, ...]]
) -> None:
    with AdapterBench(llama, made, slots=slots, max_rows=4) as bench:
        bench.provide()
        bench.slots.point("a", 1)
        bench.slots.point("b", 1)
        specs: list[SequenceSpec] = []
        for kind, *arguments in operations:
            if kind == "insert":
                ref, policy, kv, tokens = arguments
                at = len(specs)
                prompt = prompt_of(3 + at % 3 * 20, at % 4)
                spec = row(f"s{at}", prompt, ref, adapter_policy=policy, kv_on_swap=kv, max_tokens=tokens)
                specs.append(spec)
                bench.submit(spec)
            elif kind == "publish":
                bench.publish(arguments[0])
            elif kind == "cancel":
                bench.engine.cancel(f"s{arguments[0]}")
            else:
                for _ in range(arguments[0]):
                    bench.turn()
        bench.run()
        for spec in specs:
            assert bench.finish(spec.id).reason in ("length", "cancelled")
            bench.assert_true_to_its_versions(spec)
            if "@" in spec.adapter:
                assert set(bench.versions(spec.id)) <= {spec.adapter}
            elif spec.adapter_policy == "pin":
                assert len(set(bench.versions(spec.id))) <= 1
        bench.assert_nothing_is_held()
