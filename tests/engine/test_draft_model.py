"""A draft model changes when tokens come, and nothing else: whatever it says, and whatever its rows do meanwhile."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tokenizers import Tokenizer

from mlx_model.config import EngineConfig, SpeculationConfig
from mlx_model.draft import DraftModel, check_tokenizer
from mlx_model.kv.layout import KvLayout
from mlx_model.loader import LoadedModel, load_model
from shared.errors import SetupError
from shared.sequences import SequenceSpec
from shared.text import grammar
from tests.engine.adapter_bench import AdapterBench, make_versions, row
from tests.engine.conftest import Bench, SpiedModel, prompt_of, spec
from tests.engine.drafted import ALWAYS, ROWS, accepted_unchanged
from tests.engine.small_models import LLAMA, write_model
from worker.engine.batch.grammars import Place
from worker.engine.batch.row import Row
from worker.engine.speculation.draft_batch import DraftBatch, draft_batch
from worker.engine.speculation.drafting import Drafting

BY_MODEL = replace(ALWAYS, own_text=False, memory_bytes=0)
PRINTED = grammar.of_regex("[0-9]{30}")


def drafting(loaded: LoadedModel, draft: LoadedModel, context: int = 1024) -> LoadedModel:
    """The model, and another one that drafts for it."""
    card = draft.card
    beside = DraftModel("small", draft.model, card.vocab_size, context, card.kv_bytes_per_token, KvLayout())
    return replace(loaded, draft=beside)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of other weights, and of fewer logits than the model has."""
    return write_model(tmp_path_factory.mktemp("draft"), LLAMA | {"num_hidden_layers": 1, "vocab_size": 300}, seed=5)


@pytest.fixture(scope="module")
def other(other_folder: Path) -> LoadedModel:
    return load_model(EngineConfig(str(other_folder)))


class Spied:
    """A bench whose draft model's forwards are noted."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: SpeculationConfig = BY_MODEL,
        clock: Callable[[], float] = time.perf_counter,
        **engine: object,
    ) -> None:
        draft, batches = loaded.draft, list[DraftBatch]()
        assert draft is not None
        self.spy = SpiedModel(draft.model)

        def noted(*made_of: Any) -> DraftBatch | None:
            batch = draft_batch(*made_of)
            assert batch is not None
            batches.append(batch)
            return batch

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("worker.engine.engine.Drafting", partial(Drafting, clock=clock))
            patch.setattr("worker.engine.engine.draft_batch", noted)
            self.bench = Bench(replace(loaded, draft=replace(draft, model=self.spy)), speculation=config, **engine)
        (self.batch,) = batches

    def run(self, *rows: SequenceSpec) -> None:
        self.bench.submit(*rows)
        self.bench.run()


def written(loaded: LoadedModel, rows: list[SequenceSpec]) -> list[list[int]]:
    """By the model alone."""
    bench = Bench(loaded)
    bench.submit(*rows)
    bench.run()
    return [bench.tokens(each.id) for each in rows]


@settings(max_examples=6)
@given(st.integers(0, 1 << 30), st.booleans(), st.sampled_from([ALWAYS, ROWS, BY_MODEL]), st.sampled_from([60, 1024]))
def test_a_draft_model_changes_nothing(
    llama: LoadedModel, other: LoadedModel, seed: int, is_same: bool, config: SpeculationConfig, context: int
) -> None:
    accepted_unchanged(drafting(llama, llama if is_same else other, context), seed, config)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 0.8, "grammar": PRINTED}])
def test_what_is_of_one_mind_with_the_model_is_always_right(llama: LoadedModel, sampling: dict[str, object]) -> None:
    """At any temperature: it draws with the noise of the row, under its grammar, and rows share its forwards."""
    rows = [
        spec(f"s{at}", prompt_of(9 + 7 * at, seed=at), max_tokens=30, seed=at, repetition_penalty=1.1, **sampling)
        for at in range(3)
    ]
    spied = Spied(drafting(llama, llama))
    spied.run(*rows)
    assert [spied.bench.tokens(each.id) for each in rows] == written(llama, rows)
    stats = spied.bench.engine.stats().speculation
    assert stats.accepted == stats.drafted == stats.model_accepted > 60
    assert len(spied.spy.fed) <= 3 + 5 * stats.steps


def test_what_is_refused_is_forgotten(llama: LoadedModel, other: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft is what the draft model alone says behind that context."""
    rows = [spec(f"s{at}", prompt_of(20 + at, seed=at), max_tokens=30) for at in range(3)]
    spied = Spied(drafting(llama, other))
    said: list[tuple[list[int], list[int]]] = []
    drafts = spied.batch.drafts

    def noted(inputs: dict[Row, int], lengths: dict[Row, int]) -> dict[Row, list[int]]:
        found = drafts(inputs, lengths)
        for each, ids in found.items():
            untold = [inputs[each]] if each.position > len(each.tokens) else []
            said.append(([*each.spec.prompt_ids, *each.tokens, *untold], ids))
        return found

    monkeypatch.setattr(spied.batch, "drafts", noted)
    spied.run(*rows)
    assert [spied.bench.tokens(each.id) for each in rows] == written(llama, rows)
    stats = spied.bench.engine.stats().speculation
    assert len(said) > 40 and stats.model_accepted < stats.model_drafted / 2
    chosen = said[::9]
    alone = [spec(f"s{at}", context, max_tokens=len(ids)) for at, (context, ids) in enumerate(chosen)]
    assert [ids for _, ids in chosen] == written(other, alone)
    assert not len(spied.batch) and not spied.batch.rows and not spied.batch.feeds, "rows that have left hold nothing"


def test_samples_of_a_prompt_share_its_reading_and_long_prompts_are_read_in_pieces(llama: LoadedModel) -> None:
    rows = [spec(f"s{at}", prompt_of(300), max_tokens=40, temperature=1.0, seed=at) for at in range(4)]
    spied = Spied(drafting(llama, llama), prefill_chunk=128)
    spied.run(*rows)
    assert [spied.bench.tokens(each.id) for each in rows] == written(llama, rows)
    assert spied.spy.fed[:3] == [128, 128, 44]
    assert max(spied.spy.fed) == 128 and spied.bench.engine.stats().speculation.model_accepted > 100


def test_a_row_beyond_the_draft_models_context_goes_without(llama: LoadedModel) -> None:
    rows = [spec("long", prompt_of(60), max_tokens=30), spec("short", prompt_of(9), max_tokens=80)]
    spied = Spied(drafting(llama, llama, context=64))
    spied.run(*rows)
    assert [spied.bench.tokens(each.id) for each in rows] == written(llama, rows)
    stats = spied.bench.engine.stats().speculation
    assert 30 < stats.model_accepted < 64 - 9, "until the short one has become too long"


def test_nothing_is_read_beyond_the_draft_models_context_while_prompts_keep_coming(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [spec(f"s{at}", prompt_of(9 + 9 * at), max_tokens=80) for at in range(2)]
    spied = Spied(drafting(llama, llama, context=64))
    drafts, begin, steps, longest = spied.batch.drafts, spied.bench.engine.drafting.begin, 0, 0

    def noted(inputs: dict[Row, int], lengths: dict[Row, int]) -> dict[Row, list[int]]:
        nonlocal longest
        found = drafts(inputs, lengths)
        longest = max(longest, *(spied.batch._read[each].size for each in spied.batch.rows))
        return found

    def amid_prompts(rows: int, *, alone: bool, hurried: bool) -> None:
        nonlocal steps
        steps += rows > 1
        begin(rows, alone=alone and steps < 6, hurried=hurried)

    monkeypatch.setattr(spied.batch, "drafts", noted)
    monkeypatch.setattr(spied.bench.engine.drafting, "begin", amid_prompts)
    spied.run(*rows)
    assert [spied.bench.tokens(each.id) for each in rows] == written(llama, rows)
    assert 40 < longest <= 64


def test_a_part_of_the_prompt_is_enough(llama: LoadedModel) -> None:
    spied = Spied(drafting(llama, llama, context=100), replace(BY_MODEL, draft_context=20))
    each = spec("s", prompt_of(200), max_tokens=30)
    spied.run(each)
    assert [spied.bench.tokens("s")] == written(llama, [each])
    assert spied.spy.fed[0] == 20 and spied.bench.engine.stats().speculation.model_drafted > 0


def test_a_draft_model_that_fails_is_left_alone_and_rows_go_on(llama: LoadedModel) -> None:
    rows = [spec(f"s{at}", prompt_of(9, seed=at), max_tokens=40) for at in range(2)]
    for failing in (9, 2):  # ids of a forward: of a prompt, of a draft
        spied = Spied(drafting(llama, llama))
        spied.spy.fails = lambda tokens_BL, failing=failing: tokens_BL.size == failing  # type: ignore[misc]
        spied.run(rows[0])
        spied.run(rows[1])
        assert [spied.bench.tokens(each.id) for each in rows] == written(llama, rows)
        assert spied.bench.engine.stats().speculation.draft_model == ""
        assert not len(spied.batch)


def test_after_one_failure_of_a_draft_model_new_rows_are_drafted_for(llama: LoadedModel) -> None:
    rows = [spec(f"s{at}", prompt_of(9, seed=at), max_tokens=40) for at in range(3)]
    spied = Spied(drafting(llama, llama))
    for each, fails in zip(rows, (True, False, True), strict=True):
        spied.spy.fails = lambda tokens_BL, fails=fails: fails  # type: ignore[misc]
        spied.run(each)
    assert [spied.bench.tokens(each.id) for each in rows] == written(llama, rows)
    stats = spied.bench.engine.stats().speculation
    assert stats.draft_model == "small" and stats.model_accepted > 20


def test_a_row_whose_grammar_fails_for_the_draft_model_alone_goes_without_and_others_go_on(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [spec(f"s{at}", prompt_of(9, seed=at), max_tokens=40) for at in range(3)]
    rows[1:] = [structs.replace(each, sampling=structs.replace(each.sampling, grammar=PRINTED)) for each in rows[1:]]
    spied, copied, copy = Spied(drafting(llama, llama)), [], Place.copy
    spied.bench.submit(*rows)
    spied.bench.turn()
    bad = spied.bench.engine.rows["s1"].place

    def copies(place: Place) -> Place:
        copied.append(place)
        if place is bad:
            raise ValueError("the matcher is gone")
        return copy(place)

    monkeypatch.setattr(Place, "copy", copies)
    spied.bench.run()
    monkeypatch.undo()
    assert copied.count(bad) == 1, "it is not tried again"
    assert [spied.bench.tokens(each.id) for each in rows] == written(llama, rows)
    stats = spied.bench.engine.stats().speculation
    assert stats.draft_model == "small" and stats.model_accepted > 40


def test_its_kv_counts_where_rows_are_admitted(llama: LoadedModel, other: LoadedModel) -> None:
    bench = Bench(drafting(llama, other, context=20), speculation=BY_MODEL)
    bench.submit(spec("s", prompt_of(9), max_tokens=40))
    bench.turn()
    kv = 49 * llama.card.kv_bytes_per_token
    assert bench.engine.stats().kv_bytes == kv + 20 * other.card.kv_bytes_per_token
    bench.run()
    tight = replace(drafting(llama, other), kv_limit_bytes=kv)
    alone = Bench(tight, speculation=BY_MODEL)
    alone.submit(spec("s", prompt_of(9), max_tokens=40))
    alone.run()
    assert alone.finish("s").reason == "length", "a row that fits without the draft model is not refused for it"


@pytest.mark.long
@pytest.mark.parametrize("policy", ["pin", "follow"])
def test_rows_of_adapters_are_drafted_for_by_a_model_that_knows_none(
    llama: LoadedModel, tmp_path: Path, policy: Literal["pin", "follow"]
) -> None:
    made = make_versions(llama, tmp_path)
    rows = [
        structs.replace(row(f"s{at}", prompt_of(9, seed=at), name, max_tokens=60), adapter_policy=policy)
        for at, name in enumerate(["", "a", "b@1"])
    ]
    with AdapterBench(drafting(llama, llama), made, speculation=BY_MODEL) as bench:
        bench.run_amid_a_hot_load(rows)
        stats = bench.engine.stats().speculation
        assert 40 < stats.model_accepted < stats.model_drafted
        assert ("a@2" in bench.versions("s1")) == (policy == "follow")


class Seconds:
    """A clock that goes on with each forward."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def of(self, spied: Spied, of_draft: float) -> None:
        """What a forward of the model and one of its draft model take."""
        SpiedModel.inside(spied.bench).fails = lambda tokens_BL: self.add(1.0)
        spied.spy.fails = lambda tokens_BL: self.add(of_draft)

    def add(self, seconds: float) -> bool:
        self.now += seconds
        return False


@pytest.mark.long
@pytest.mark.parametrize("of_draft", [0.1, 1.0])
def test_a_draft_model_that_is_too_slow_is_hardly_asked(llama: LoadedModel, of_draft: float) -> None:
    """Here a wider step takes no longer, and the draft model is always right."""
    plain, clock = Bench(llama), Seconds()
    spied = Spied(drafting(llama, llama), SpeculationConfig(own_text=False), clock)
    clock.of(spied, of_draft)
    steps = SpiedModel.inside(plain)
    for at in range(3):
        rows = [spec(f"s{at}-{of}", prompt_of(9, seed=of), max_tokens=60) for of in range(3)]
        for bench in (plain, spied.bench):
            bench.submit(*rows)
            bench.run()
    took, stats = len(steps.fed), spied.bench.engine.stats().speculation
    assert stats.model_accepted == stats.model_drafted
    if of_draft < 1:
        assert clock.now < took / 2
    else:
        assert clock.now < took * 1.1 and 0 < stats.model_drafted < 40


def loaded_with(draft: Path, folder: Path) -> LoadedModel:
    return load_model(EngineConfig(str(folder), speculation=SpeculationConfig(draft_model=str(draft))))


def test_a_draft_model_is_loaded_beside_the_model(llama_folder: Path, other_folder: Path) -> None:
    loaded = loaded_with(other_folder, llama_folder)
    assert loaded.draft is not None and loaded.draft.vocab_size == 300
    assert loaded.draft.name == other_folder.name and loaded.draft.context_length == 1024


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"A": 65', '"A": 300', "token 65 is 'A' in the model and nothing in the draft model"),
        ('"content": "<s>"', '"content": "<t>"', "token 256 is '<s>' in the model and '<t>' in the draft model"),
        ('"special": true', '"special": false', "special token 256 is '<s>' in the model and nothing in"),
    ],
)
def test_a_draft_model_of_another_tokenizer_is_refused_with_the_first_difference(
    llama: LoadedModel, before: str, after: str, said: str
) -> None:
    ours = llama.tokenizer
    text = Tokenizer.from_str(ours.tokenizer_json).to_str(pretty=True)
    assert before in text
    check_tokenizer(ours, structs.replace(ours, tokenizer_json=text))
    with pytest.raises(SetupError, match=f"another tokenizer.*{said}"):
        check_tokenizer(ours, structs.replace(ours, tokenizer_json=text.replace(before, after, 1)))


def test_a_draft_model_that_ends_its_texts_in_another_way_is_refused_at_start(
    llama_folder: Path, tmp_path: Path
) -> None:
    draft = write_model(tmp_path, LLAMA)
    settings = draft / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"bos_token": "<s>"', '"bos_token": "</s>"'))
    with pytest.raises(SetupError, match=r"--draft-model-path .*name bos_token is '<s>' in the model and '</s>' in"):
        loaded_with(draft, llama_folder)


def test_a_draft_model_that_cannot_forget_is_refused_by_what_it_keeps(llama: LoadedModel) -> None:
    draft = drafting(llama, llama).draft
    assert draft is not None
    draft.check()
    with pytest.raises(SetupError, match="RotatingKVCache, which cannot forget"):
        replace(draft, kv=KvLayout(bound=24)).check()


def test_a_folder_without_a_draft_model_is_named(llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"--draft-model-path .*no model folder"):
        loaded_with(tmp_path / "none", llama_folder)
