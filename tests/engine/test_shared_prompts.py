"""Rows that begin alike hold their beginning once, and say what they would say alone."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import create_attention_mask
from msgspec import structs

from mlx_model.kv.kinds import copies, divide, keep_rows, leaves, ragged, shared, take_back, whole
from mlx_model.kv.layout import layout_of
from mlx_model.kv.shared import Form
from mlx_model.loader import LoadedModel
from shared.sequences import SequenceSpec
from tests.engine import test_batching
from tests.engine.adapter_bench import AdapterBench, make_versions, row
from tests.engine.conftest import Bench, SpiedModel, prompt_of, spec
from tests.engine.kv_models import CONFIGS, VOCAB, Model
from tests.engine.test_kv_kinds import bench_of, check_like_cold
from tests.engine.test_speculation import ALWAYS, predicted
from worker.engine.batch import shared_prompts
from worker.engine.batch.row import Row
from worker.engine.messages import RowRequest

SHARING = (*sorted(set(CONFIGS) - {"mamba2"}), "llama 4", "qwen3_5 8", "deepseek_v3 8")


def group(name: str, prompt: list[int], count: int, **sampling: object) -> list[SequenceSpec]:
    """Samples of one prompt, greedy ones and others, of different lengths."""
    return [
        spec(f"{name}{n}", prompt, group=name, seed=n, **{"max_tokens": 8 + n, "temperature": n % 2} | sampling)
        for n in range(count)
    ]


def held(bench: Bench) -> int:
    """Bytes of KV of the rows that decode."""
    arrays: list[mx.array] = []
    for leaf in leaves(bench.engine.batch.cache[:-1]):
        arrays += [leaf.keys, leaf.values]
        arrays += [each for pair in getattr(leaf, "beginnings", {}).values() for each in pair]
    return sum(each.nbytes for each in arrays)


def stored(bench: Bench) -> list[int]:
    """Positions of each beginning, in a layer that has them."""
    leaf = next(leaf for leaf in leaves(bench.engine.batch.cache[:-1]) if hasattr(leaf, "beginnings"))
    return sorted(keys.shape[2] for keys, _ in leaf.beginnings.values())


@pytest.mark.long
@pytest.mark.parametrize("name", SHARING)
def test_groups_and_rows_alone_share_a_batch(name: str, model_of: Model) -> None:
    bench = bench_of(model_of(name), share_prompts="always", max_rows=16)
    prompt = prompt_of(80, 1)
    nested = group("b", [*prompt[:64], *prompt_of(30, 5)], 3)
    specs = [*group("a", prompt, 4), *nested, spec("c", prompt_of(9, 3)), spec("d", [5])]
    bench.submit(*specs)
    bench.until(lambda: bench.engine.batch.decoding == len(specs))
    assert stored(bench) == [8, 15, 29, 64]
    bench.engine.cancel("b1")
    late = [spec("late", prompt, group="a"), spec("other", [*prompt[:70], *prompt_of(9, 8)])]
    bench.submit(*late)
    bench.until(lambda: bool(bench.tokens("late")))
    assert bench.engine.batch.spared > len(prompt)
    bench.run()
    check_like_cold(bench.loaded, bench, *(each for each in [*specs, *late] if each.id != "b1"))


@pytest.mark.parametrize("name", ["mamba2", "deepseek_v3 last-24"])
def test_other_kinds_copy(name: str, model_of: Model) -> None:
    bench = bench_of(model_of(name), share_prompts="always")
    bench.submit(*(specs := group("a", prompt_of(40), 3)))
    bench.until(lambda: bench.engine.batch.decoding == len(specs))
    assert bench.engine.batch.spared == 0
    bench.run()
    check_like_cold(bench.loaded, bench, *specs)


def test_chunks_of_positions_are_not_shared(llama: LoadedModel) -> None:
    """A model whose masks count from a row's first position would read others, in chunks longer than any trial."""
    model = test_batching.small("llama4", llama).model
    model.language_model.model.attention_chunk_size = 4096
    assert not layout_of(model, 0, 64).shares


def test_a_beginning_that_the_prefix_cache_had_is_shared_by_other_prompts(llama: LoadedModel) -> None:
    bench, system = bench_of(llama, share_prompts="always"), prompt_of(64)
    specs = [spec(f"s{n}", [*system, *prompt_of(5 + n, 1 + n)], max_tokens=24) for n in range(4)]
    for each in specs:
        bench.submit(each)
        bench.until(lambda each=each: bool(bench.tokens(each.id)))  # type: ignore[misc]
    assert bench.engine.batch.spared > len(system)
    bench.run()
    check_like_cold(llama, bench, *specs)


@pytest.mark.parametrize("how", [{"cache": False}, {"fresh": True}])
def test_what_is_for_no_others_or_from_none_is_shared_with_none(llama: LoadedModel, how: dict[str, bool]) -> None:
    bench, prompt = bench_of(llama, share_prompts="always"), prompt_of(40)
    specs = [spec("s0", prompt), *(structs.replace(spec(f"s{n}", prompt), **how) for n in (1, 2))]
    bench.submit(*specs)
    bench.until(lambda: bench.engine.batch.decoding == 3)
    assert bench.engine.batch.spared == 0
    bench.run()
    check_like_cold(llama, bench, *specs)


def test_more_rows_fit_the_memory(llama: LoadedModel) -> None:
    """16 samples of 128 + 16 where 4 copies fit, and the memory that is taken is what was counted."""
    loaded = replace(llama, kv_limit_bytes=4 * 144 * llama.card.kv_bytes_per_token)
    specs = group("a", prompt_of(128), 16, max_tokens=16)
    rows = {}
    for when in ("off", "auto"):
        bench = bench_of(loaded, share_prompts=when, max_rows=64)
        bench.submit(*specs)
        bench.until(lambda bench=bench: bench.engine.batch.decoding > 3)  # type: ignore[misc]
        stats = bench.engine.stats()
        rows[when] = stats.rows
        assert stats.kv_bytes <= loaded.kv_limit_bytes
        if when == "auto":
            token = llama.card.kv_bytes_per_token
            assert stats.kv_bytes == (2 * 127 + 16 * 17) * token  # a row feeds the prompt's last id by itself
            assert stats.kv_spared_bytes == 15 * 127 * token
            assert held(bench) <= (127 + 16 * 256) * token  # arrays grow by 256 positions
        bench.run()
        check_like_cold(llama, bench, *specs)
    assert rows == {"off": 4, "auto": 16}


def test_a_system_prompt_that_groups_share_is_stored_and_counted_once(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 groups of 4 with 256 + 33 ids in common and 31 of their own, and two rows alone, where two prompts do not fit.

    So a prompt that is computed reads what it has in common where it is.
    """
    token, system = llama.card.kv_bytes_per_token, prompt_of(289)
    loaded = replace(llama, kv_limit_bytes=(256 + 8 * 64 + 63 + 26 * 41 + 8) * token)
    specs = [each for n in range(6) for each in group(f"g{n}", [*system, *prompt_of(31, 1 + n)], 4, max_tokens=40)]
    specs += [spec(f"s{n}", [*system, *prompt_of(31, 9 + n)], max_tokens=40) for n in range(2)]
    specs = [structs.replace(each, sequence_class="batch") for each in specs]
    bench = bench_of(loaded, max_rows=64)
    begun, begin = list[Any](), shared_prompts.SharedPrompts.begun

    def noted(*args: Any) -> Any:
        begun.append(begin(*args))
        return begun[-1]

    monkeypatch.setattr(shared_prompts.SharedPrompts, "begun", noted)
    bench.submit(*specs)
    most = 0
    while bench.engine.busy:
        bench.turn()
        stats, batch = bench.engine.stats(), bench.engine.batch
        assert stats.kv_bytes <= loaded.kv_limit_bytes
        if batch.decoding == len(specs):
            most = held(bench)
            assert stats.kv_bytes == (256 + 8 * 63 + 63 + 26 * 41) * token
            assert stats.kv_spared_bytes == (26 * 319 - 256 - 8 * 63) * token
    assert 0 < most <= (256 + 8 * 63 + 26 * 256) * token  # arrays grow by 256 positions
    first, *others = [each and each[1] for each in begun]
    assert first is None and set(others) == {256, 288} and len(others) == 7, "the prefix cache has 32 more by and by"
    check_like_cold(llama, bench, *specs)


def test_prompts_come_one_by_one_where_copies_do_not_fit(llama: LoadedModel) -> None:
    """16 samples are taken over, which begin with the prompt that the cache has: one copy at a time is computed."""
    loaded, prompt = replace(llama, kv_limit_bytes=5 * 160 * llama.card.kv_bytes_per_token), prompt_of(128)
    before = bench_of(llama)
    specs = group("a", prompt, 16, max_tokens=32)
    before.submit(*specs)
    before.until(lambda: all(len(before.tokens(each.id)) > 3 for each in specs))
    bench = bench_of(loaded, max_rows=64, prefill_rows=16)
    bench.submit(spec("first", prompt, max_tokens=1))
    bench.run()
    spy = SpiedModel.inside(bench)
    shapes: list[Sequence[int]] = []
    spy.fails = lambda ids_BL: bool(shapes.append(ids_BL.shape))  # type: ignore[func-returns-value]
    for each in specs:
        bench.submit(each, prior=tuple(before.events[each.id]), attempt=2)
    bench.run()
    assert {rows for rows, width in shapes if width > 1} == {1}
    assert all(bench.finish(each.id).reason == "length" for each in specs)


def has(prompt: Sequence[int], piece: Sequence[int]) -> bool:
    return any(prompt[at : at + len(piece)] == piece for at in range(len(prompt)))


def test_one_prompt_of_each_class_is_on_its_way_where_copies_do_not_fit(llama: LoadedModel) -> None:
    """Groups come through the lane, rows alone through the batch, and both have both classes."""
    loaded = replace(llama, kv_limit_bytes=6000 * llama.card.kv_bytes_per_token)
    bench = bench_of(loaded, max_rows=64, prefill_rows=16, prefill_chunk=16, prefix_cache_bytes=0)
    specs: list[SequenceSpec] = []
    for at, of in enumerate(("interactive", "batch") * 2):
        rows = [
            *group(f"g{at}", prompt_of(160, at), 6, max_tokens=150),
            spec(f"alone{at}", prompt_of(150, 9 + at), max_tokens=150),
        ]
        specs += [structs.replace(each, sequence_class=of) for each in rows]
    spy = SpiedModel.inside(bench)
    fed: list[Sequence[int]] = []
    spy.fails = lambda ids_BL: bool(fed.extend(ids_BL.tolist()))  # type: ignore[func-returns-value]
    bench.submit(*specs)
    bench.until(lambda: all(bench.tokens(each.id) for each in specs))
    for of in ("interactive", "batch"):
        prompts = {each.prompt_ids for each in specs if each.sequence_class == of}
        pieces = [tuple(ids) for ids in fed if len(ids) > 4]
        order = [prompt for piece in pieces for prompt in prompts if has(prompt, piece)]
        assert len([prompt for prompt, _ in groupby(order)]) == len(prompts), "one is fed to its end before the next"


def test_a_batch_takes_the_form_that_pays_and_leaves_it(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = llama.card.kv_bytes_per_token // llama.config["num_hidden_layers"]
    monkeypatch.setattr(shared_prompts, "LEAST_ON_CPU", 40 * layer)  # positions that a beginning must spare
    bench = bench_of(llama)
    alone = [spec(f"s{n}", prompt_of(20, n), max_tokens=60) for n in range(2)]
    bench.submit(*alone)
    bench.until(lambda: bench.engine.batch.decoding == 2)
    forms = [bench.engine.batch.spared > 0]
    bench.submit(*(samples := group("a", prompt_of(90), 4, max_tokens=20)))
    bench.until(lambda: bool(bench.tokens("a3")))
    forms.append(bench.engine.batch.spared > 0)
    bench.until(lambda: bench.engine.batch.decoding == 2)
    bench.submit(late := spec("late", prompt_of(9, 9)))
    bench.until(lambda: bool(bench.tokens("late")))
    forms.append(bench.engine.batch.spared > 0)
    assert forms == [False, True, False]
    bench.run()
    check_like_cold(llama, bench, *alone, *samples, late)


@pytest.mark.parametrize(("is_in_place", "shares"), [(True, True), (False, False)])
def test_on_cuda_less_pays_where_a_kernel_reads_beginnings(
    is_in_place: bool, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 rows of 2,048 positions of a 4B model on an H200: 0.87 of a step over copies, or twice of it."""
    monkeypatch.setattr(shared_prompts, "on_cpu", lambda: False)
    monkeypatch.setattr(shared_prompts, "on_cuda", lambda: True)
    prompts = shared_prompts.SharedPrompts("auto", 4096, "keys", lambda: is_in_place)
    rows = [Row(RowRequest(each), frozenset(), None) for each in group("a", prompt_of(2048), 32)]
    for each in rows:
        each.kv_versions.add("")
    assert prompts.pays(rows) == shares


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss"])
def test_drafts_are_checked_behind_a_beginning(name: str, llama: LoadedModel, model_of: Model) -> None:
    loaded = llama if name == "llama" else model_of(name)
    plain, prompt = Bench(loaded), prompt_of(70)
    groups = [*group("a", prompt, 2, max_tokens=30), *group("b", [*prompt[:64], *prompt_of(9, 1)], 2, max_tokens=30)]
    rows = predicted(plain, *groups)
    rows[1] = half_right(rows[1])
    bench = Bench(loaded, share_prompts="always", speculation=ALWAYS)
    bench.submit(*rows)
    bench.until(lambda: bench.engine.batch.decoding == len(rows))
    assert stored(bench) == [5, 8, 64]
    bench.run()
    assert bench.engine.stats().speculation.accepted > 30
    assert [bench.tokens(each.id) for each in rows] == [plain.tokens(each.id) for each in rows]


def half_right(each: SequenceSpec) -> SequenceSpec:
    """The same with drafts that do not hold to their ends."""
    ids = [(id_ + 1) % 256 if at % 3 == 2 else id_ for at, id_ in enumerate(each.prediction_ids)]
    return structs.replace(each, prediction_ids=tuple(ids))


def test_an_answer_behind_a_shared_prompt_is_found_again(llama: LoadedModel) -> None:
    bench, prompt = bench_of(llama, share_prompts="always"), prompt_of(70)
    bench.submit(*group("a", prompt, 3, max_tokens=40), *group("b", [*prompt[:64], 7, 8], 2, max_tokens=40))
    bench.until(lambda: bench.engine.batch.decoding == 5)
    assert stored(bench) == [1, 5, 64]
    bench.run()
    second = spec("second", [*prompt, *bench.tokens("a1"), *prompt_of(5, 1)])
    bench.submit(second)
    bench.run()
    assert bench.finish("second").cached_tokens >= 96  # of 109, in blocks
    check_like_cold(llama, bench, second)


def test_equal_prompts_of_other_versions_share_nothing(llama: LoadedModel, tmp_path: Path) -> None:
    """And begin alike with none: of `a@1`, `b@1` and the base, and of `a` from before and after a hot load."""
    with AdapterBench(llama, make_versions(llama, tmp_path), share_prompts="always", max_rows=16) as bench:
        prompt = prompt_of(70)
        rows = [
            row(
                f"s{at}",
                [*prompt, *[at] * (at // 3)],
                of,
                max_tokens=40,
                adapter_policy="follow" if of == "a" else "pin",
            )
            for at, of in enumerate(["", "a", "b@1", "a", "b@1", ""])
        ]
        bench.run_amid_a_hot_load(rows)
        bench.submit(late := row("late", prompt, "a"), *(same := [row(f"t{at}", prompt, "a@1") for at in range(2)]))
        bench.run()
        for each in (late, *same):
            bench.assert_true_to_its_versions(each)


def test_samples_whose_prompt_two_versions_computed_share_it(llama: LoadedModel, tmp_path: Path) -> None:
    """For it was computed once for all of them, and admission counts it once."""
    with AdapterBench(llama, make_versions(llama, tmp_path), share_prompts="always", prefill_chunk=8) as bench:
        bench.publish("a@1")
        bench.load("a@1")
        prompt = prompt_of(300)
        rows = [row(f"s{at}", prompt, "a", group="g", adapter_policy="follow") for at in range(3)]
        bench.submit(*rows)
        bench.turn()
        bench.publish_and_read("a@2")
        bench.until(lambda: bench.engine.batch.decoding == 3)
        assert {len(each.kv_versions) for each in bench.engine.rows.values()} == {2}
        assert bench.engine.batch.spared == 2 * 299
        bench.run()
        assert bench.tokens("s0") == bench.tokens("s1") == bench.tokens("s2")


def test_what_rows_write_with_another_version_leaves_their_prompt_shared(llama: LoadedModel, tmp_path: Path) -> None:
    loaded = replace(llama, kv_limit_bytes=690 * llama.card.kv_bytes_per_token)  # 4 copies of 60 + 90
    with AdapterBench(loaded, make_versions(llama, tmp_path), max_rows=16) as bench:
        bench.publish("a@1")
        bench.load("a@1")
        prompt = prompt_of(60)
        rows = [row(f"s{at}", prompt, "a", group="g", adapter_policy="follow", max_tokens=90) for at in range(4)]
        bench.submit(*rows)
        bench.until(lambda: len(bench.tokens("s1")) > 2)
        assert bench.engine.batch.spared == 0, "nothing asks for it"
        bench.publish_and_read("a@2")
        bench.until(lambda: set(bench.versions("s1")[-1:]) == {"a@2"})
        bench.submit(row("late", prompt_of(9)))
        bench.until(lambda: bool(bench.tokens("late")))
        assert bench.engine.batch.spared > 3 * 59
        bench.run()
        for each in rows:
            bench.assert_true_to_its_versions(each)


# -- a leaf against one of copies

START = st.tuples(st.integers(1, 3), st.integers(0, 9))  # rows of a group, and the ids that they begin with
STEP = st.one_of(
    st.tuples(st.just("join"), START),
    st.tuples(st.just("leave"), st.integers(1, 6)),
    st.tuples(st.just("take back"), st.lists(st.integers(0, 2), min_size=24, max_size=24)),
    st.tuples(st.just("change"), st.none()),
    st.tuples(st.just("divide"), st.none()),
)
ROOT = 2  # positions that all groups begin with


class Both:
    """The same rows in a leaf of copies and in one with beginnings, read by one layer of attention."""

    def __init__(self, loaded: LoadedModel) -> None:
        assert loaded.kv.shares is not None
        self.loaded = loaded
        self.form: Form = loaded.kv.shares
        self.attention = loaded.model.layers[-1].self_attn  # the one of GPT-OSS that has no window
        self.caches: dict[str, list[Any]] = {}
        self.padding: dict[str, list[int]] = {}
        self.slack: dict[str, list[int]] = {}
        self.groups = 0
        self.chains: list[list[tuple[Any, int]]] = []  # of each row
        self.root = self.states(1, ROOT)

    def states(self, rows: int, count: int) -> mx.array:
        return self.loaded.model.model.embed_tokens(mx.random.randint(0, VOCAB, (rows, count)))  # type: ignore[no-any-return]

    def join(self, rows: int, length: int) -> None:
        one = self.loaded.kv.new(self.loaded.model)[-1]
        if length:
            states = mx.concatenate([self.root, self.states(1, length)], axis=1)
            self.attention(states, create_attention_mask(states, one, return_array=True), one)
        self.groups += 1
        for form in ("copied", "shared"):
            caches, padding = ragged(copies([one], rows)), [0] * rows
            if form == "shared":
                chains = [[("root", ROOT), (self.groups, length)] if length else []] * rows
                caches, padding = shared(caches, chains, padding, self.form)
                self.chains += chains
            if form not in self.caches:
                self.caches[form], self.padding[form], self.slack[form] = caches, padding, [0] * rows
                continue
            ours, pad = self.caches[form], self.padding[form]
            end, other = ours[0].size(), caches[0].size()
            ours[0].extend(caches[0])
            most = max(end, other)
            self.padding[form] = [most - end + each for each in pad] + [most - other + each for each in padding]
            self.slack[form] += [0] * rows
            self._end_apart(form)

    def leave(self, bits: int) -> None:
        rows = len(self.padding["copied"])
        keep = [row for row in range(rows) if (row + bits) % 3]
        if not keep:
            return
        self.chains = [self.chains[row] for row in keep]
        for form, caches in self.caches.items():
            self.padding[form] = keep_rows(caches, keep, self.padding[form])
            self.slack[form] = [self.slack[form][row] for row in keep]
            self._end_apart(form)

    def take_back(self, unused: Sequence[int]) -> None:
        for form, caches in self.caches.items():
            self.slack[form] = take_back(caches, unused[: len(self.padding[form])], self.slack[form])

    def change(self) -> None:
        """To copies and back, with each row's first position as its beginning."""
        caches, padding = whole(self.caches["shared"], range(len(self.padding["shared"])), self.padding["shared"])
        self.groups += 1
        self.chains = [[((self.groups, row), 1)] for row in range(len(padding))]
        self.caches["shared"], self.padding["shared"] = shared(caches, self.chains, padding, self.form)

    def divide(self) -> None:
        """The last beginning of each row, after its first and after its second position."""
        self.groups += 1
        for at, chain in enumerate(self.chains):
            key, length = chain[-1] if chain else ("", 0)
            if length > 2:
                parts = [((self.groups, key, part), 1) for part in range(2)]
                self.chains[at] = [*chain[:-1], *parts, (key, length - 2)]
        divide(self.caches["shared"], self.chains)

    def _end_apart(self, form: str) -> None:
        slack = self.slack[form]
        self.slack[form] = take_back(self.caches[form], [0] * len(slack), slack)

    def check(self) -> None:
        """One position a row and then two are written and read alike."""
        for count in (1, 2):
            states = self.states(len(self.padding["copied"]), count)
            copied, together = (
                self.attention(states, leaf.make_mask(count), leaf)
                for (leaf,) in (self.caches["copied"], self.caches["shared"])
            )
            assert mx.allclose(copied, together, atol=1e-4, rtol=1e-4).item()


@given(
    name=st.sampled_from(["llama", "deepseek_v3", "deepseek_v3 8", "gpt_oss"]),
    first=START,
    steps=st.lists(STEP, max_size=6),
    seed=st.integers(0, 99),
)
@settings(max_examples=16, deadline=None)
def test_a_leaf_with_beginnings_reads_what_one_of_copies_reads(
    model_of: Model, name: str, first: tuple[int, int], steps: list[tuple[str, Any]], seed: int
) -> None:
    mx.random.seed(seed)
    both = Both(model_of(name))
    both.join(*first)
    both.check()
    for what, how in steps:
        if what == "join":
            both.join(*how)
        elif what == "leave":
            both.leave(how)
        elif what == "take back":
            both.take_back(how)
        elif what == "divide":
            both.divide()
        else:
            both.change()
        both.check()
