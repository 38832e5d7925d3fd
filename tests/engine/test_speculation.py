"""Drafts change when tokens come, and nothing else: every feature beside every other, over each kind of KV."""

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Literal, cast

import mlx.core as mx
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_map
from mlx_lm.models.cache import BatchKVCache, ConcatenateKVCache
from msgspec import structs

from mlx_model.config import SpeculationConfig
from mlx_model.loader import LoadedModel
from mlx_model.sampling.draw import Draw
from shared.frames import TokenEvent
from shared.sequences import SequenceSpec
from shared.text import grammar
from tests.engine.adapter_bench import AdapterBench, make_versions, row
from tests.engine.adapter_models import MadeAdapter
from tests.engine.conftest import Bench, SpiedModel, prompt_of, spec
from tests.engine.kv_models import Model
from tests.waiting import HANG_S
from worker.engine.batch.keeping import Keeping
from worker.engine.batch.row import Row
from worker.engine.batch.row_model import RowModel
from worker.engine.speculation import batch, drafting, source
from worker.engine.speculation.drafting import Drafting, Step
from worker.engine.speculation.memory import key_of
from worker.engine.speculation.payoff import AT_FIRST, FIRST_CHANCE
from worker.engine.speculation.source import Texts
from worker.engine.speculation.unread import Unread

ALWAYS = SpeculationConfig(5, adapts_to_rows=False, adapts_to_time=False, memory_bytes=1 << 20)
ROWS = SpeculationConfig(adapts_to_time=False)  # as long as each row's are accepted
CLOSE = 1e-4  # log-probabilities
PACKED_CLOSE = {8: 0.01, 4: 0.2}  # by bits: a last bit may change a whole code; so those rows draw nothing by chance
DIGITS = grammar.of_regex("[0-9]{3}-[a-c]*x")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_logprobs": 3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs_mode": "processed_logprobs"},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"temperature": 0.8, "repetition_penalty": 0.8, "logprob_token_ids": (5, 6)},
    {"temperature": 1.0, "bad_words": ((7,), (30, 31), (3, 4, 5)), "allowed_token_ids": tuple(range(60))},
    {"min_tokens": 6, "stop_token_ids": tuple(range(0, 250, 2)), "ignore_eos": False, "temperature": 1.0},
    {"stop": ("\x10\x11", "z", "AB"), "temperature": 1.2},
    {"logit_bias": {4: 30.0, 9: 29.5}, "presence_penalty": 1.0},
    {"grammar": DIGITS, "ignore_eos": False, "temperature": 1.0},
    {"grammar": DIGITS, "ignore_eos": False, "top_logprobs": 0, "min_tokens": 4},
]


def told(events: list[TokenEvent]) -> tuple[object, ...]:
    """All but the log-probabilities, whose last bits differ."""
    finish = events[-1].finish
    assert finish is not None
    tokens = [token for event in events for token in event.tokens]
    return tokens, "".join(event.text or "" for event in events), finish.reason, finish.stop_match


def numbers(events: list[TokenEvent]) -> list[float]:
    """All log-probabilities, of competitors too."""
    own = [logprob for event in events for logprob in event.logprobs]
    return own + [each.logprob for event in events for top in event.top_logprobs or () for each in top]


def parting(ours: list[int], theirs: list[int]) -> int | None:
    """Where two rows say something else for the first time."""
    return next((at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)


class Shaken(SpiedModel):
    """A model whose logits differ by last bits, in another way in each forward."""

    size = 0.0

    def __call__(self, tokens_BL: mx.array, cache: list[Any]) -> mx.array:
        logits = super().__call__(tokens_BL, cache)
        return logits + self.size * mx.random.normal(logits.shape)


def is_on_edge(loaded: LoadedModel, row: SequenceSpec, tokens: list[int], size: float) -> bool:
    """Whether last bits decide one of these tokens: a number of its seed, or another logit, lies that close by."""
    for _ in range(16):
        bench = Bench(loaded, prefix_cache_bytes=0)
        Shaken.inside(bench).size = size
        bench.submit(row)
        bench.run()
        if bench.tokens(row.id)[: len(tokens)] != tokens:
            return True
    return False


def moves(loaded: LoadedModel, row: SequenceSpec, tokens: list[int]) -> list[float]:
    """How far its numbers move where weights differ by a rounding: some few move a thousand times as far as others."""
    kept, told = loaded.model.parameters(), list[list[float]]()
    try:
        for seed in [None, *range(4)]:
            if seed is not None:
                mx.random.seed(seed)
                loaded.model.update(tree_map(rounded, kept))
            bench = Bench(loaded, prefix_cache_bytes=0)
            bench.submit(row)
            bench.run()
            if bench.tokens(row.id) == tokens:
                told.append(numbers(bench.events[row.id]))
    finally:
        loaded.model.update(kept)
    moved = [[abs(one - other) for one, other in zip(each, told[0], strict=True)] for each in told[1:]]
    return [max(each) for each in zip(*moved, strict=True)]


def rounded(weight: mx.array) -> mx.array:
    """With other last bits, where it is not a code of a quantised one."""
    return weight * (1 + 1e-7 * mx.random.normal(weight.shape)) if weight.dtype == mx.float32 else weight


def guess(tokens: list[int], right: float, draw: random.Random) -> tuple[int, ...]:
    return tuple(token if draw.random() < right else draw.randrange(250) for token in tokens)


def some_rows(draw: random.Random, most: int, options: list[dict[str, Any]]) -> list[SequenceSpec]:
    rows: list[SequenceSpec] = []
    for at in range(draw.randint(1, most)):
        prompt = prompt_of(draw.choice([1, 2, 9, 30, 70]), seed=draw.randrange(3))
        chosen = {"max_tokens": draw.choice([1, 2, 9, 33]), "seed": at} | draw.choice(options)
        each = spec(f"s{at}", prompt, **chosen)
        of = draw.choice(["interactive", "batch"])
        rows.append(msgspec.structs.replace(each, sequence_class=of, group=draw.choice(["", "g"])))
    return rows


def come_back(bench: Bench, rows: list[SequenceSpec]) -> None:
    """Set all rows aside that run, and submit them again with what they have told."""
    running = [each for each in rows if each.id in bench.engine._rows]
    bench.engine.set_aside([each.id for each in running])
    bench.turn()
    for each in running:
        told_so_far = tuple(bench.events.get(each.id, []))
        if not told_so_far or told_so_far[-1].finish is None:
            bench.submit(each, prior=told_so_far, attempt=3)


def check(loaded: LoadedModel, seed: int, config: SpeculationConfig) -> int:
    """The same rows without drafts and with, in another order of things; how many drafted tokens held."""
    draw = random.Random(seed)
    bits = {packing.bits for packing in loaded.kv.packings if packing is not None}
    close = max((PACKED_CLOSE[each] for each in bits), default=CLOSE)
    rows = some_rows(draw, 6, [each for each in OPTIONS if not bits or not each.get("temperature")])
    plain = Bench(loaded, prefix_cache_bytes=0)
    plain.submit(*rows)
    plain.run()
    right = draw.choice([0.0, 0.6, 0.9, 1.0])
    rows = [msgspec.structs.replace(each, prediction_ids=guess(plain.tokens(each.id), right, draw)) for each in rows]
    chunk, kept = draw.choice([4, 64]), draw.choice([0, 1 << 24])
    config = replace(config, reads_beside=bool(seed % 2))
    drafting = Bench(loaded, speculation=config, prefill_chunk=chunk, prefix_cache_bytes=kept, block_size=4)
    drafting.engine._batch._tells_at_once = draw.random() < 0.5
    cancelled: set[str] = set()
    for each in rows:
        taken = draw.randrange(len(plain.events[each.id])) if draw.random() < 0.3 else 0  # by an earlier attempt
        prior = tuple(plain.events[each.id][:taken])
        drafting.events[each.id] = list(prior)
        drafting.submit(each, prior=prior, attempt=2)
        for _ in range(draw.choice([0, 1, 3])):
            drafting.turn()
        if draw.random() < 0.15:
            drafting.engine.clear_cache(rows=True)  # rows begin again
        if draw.random() < 0.3:
            come_back(drafting, rows)
        if draw.random() < 0.1:
            cancelled.add(each.id)
            drafting.engine.cancel(each.id)
    drafting.run()
    for each in rows:
        if each.id in cancelled and drafting.finish(each.id).reason == "cancelled":
            tokens = drafting.tokens(each.id)
            assert tokens == plain.tokens(each.id)[: len(tokens)]
            continue
        ours, theirs = drafting.events[each.id], plain.events[each.id]
        if (at := parting(drafting.tokens(each.id), plain.tokens(each.id))) is not None:
            assert is_on_edge(loaded, each, plain.tokens(each.id)[: at + 1], close / 5)
            assert drafting.logprobs(each.id)[:at] == pytest.approx(plain.logprobs(each.id)[:at], abs=close)
            continue
        assert told(ours) == told(theirs)
        apart = [abs(one - other) for one, other in zip(numbers(ours), numbers(theirs), strict=True)]
        if max(apart, default=0.0) > close:
            by_rounding = moves(loaded, each, plain.tokens(each.id))
            assert all(one <= max(close, 2 * other) for one, other in zip(apart, by_rounding, strict=True)), apart
    return drafting.engine.stats().speculation.accepted


EVERY_KIND = [
    *("llama", "llama 4", "qwen3 8", "deepseek_v3", "gemma3_text", "gpt_oss", "llama last-24", "qwen3_5 last-24"),
    *("qwen3_5", "lfm2", "lfm2 4", "jamba", "falcon_h1", "mamba2"),
]


@pytest.mark.long
@settings(max_examples=42)
@given(st.integers(0, 1 << 30), st.sampled_from(EVERY_KIND), st.booleans())
@example(782751988080, "llama 4", True)  # a code changes
@example(20, "qwen3_5 last-24", True)  # a token whose numbers a rounding moves by 2e-4
@example(26169243, "gemma3_text", True)  # a number of the seed lies 1e-7 from where another token begins
def test_drafts_change_nothing(model_of: Model, llama: LoadedModel, seed: int, name: str, always: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        draw = random.Random(f"{seed} apart")
        patch.setattr(batch, "LOOSE", draw.choice([3, batch.LOOSE]))  # far behind is soon reached
        if draw.random() < 0.5:
            patch.setattr(RowModel, "draws_in_place", lambda *_: True)
        check(llama if name == "llama" else model_of(name), seed, ALWAYS if always else ROWS)


def predicted(bench: Bench, *rows: SequenceSpec) -> list[SequenceSpec]:
    """The rows with what they will write, and what that is, by a bench without drafts."""
    bench.submit(*rows)
    bench.run()
    return [msgspec.structs.replace(each, prediction_ids=tuple(bench.tokens(each.id))) for each in rows]


def test_a_right_prediction_takes_a_fraction_of_the_forwards(llama: LoadedModel) -> None:
    plain = Bench(llama)
    rows = predicted(plain, *(spec(f"s{at}", prompt_of(9, seed=at), max_tokens=48, temperature=1.0) for at in range(3)))
    bench = Bench(llama, speculation=ALWAYS)
    spy = SpiedModel.inside(bench)
    bench.submit(*rows)
    bench.run()
    assert [bench.tokens(each.id) for each in rows] == [plain.tokens(each.id) for each in rows]
    assert len(spy.fed) < 2 + 48 / 5
    counted = [bench.finish(each.id) for each in rows]
    assert all(each.accepted_prediction_tokens > 35 and not each.rejected_prediction_tokens for each in counted)
    stats = bench.engine.stats()
    assert stats.tokens == 3 * 48 and stats.speculation.accepted == stats.speculation.drafted


class Witness(SpiedModel):
    """Notes of each forward how far it reads, and whether the step before has been read by then."""

    bench: Bench
    seen: list[tuple[int, bool]]  # rows of each forward of several ids
    farthest: int

    def __call__(self, tokens_BL: mx.array, cache: list[Any]) -> mx.array:
        running = self.bench.engine._batch
        assert isinstance(running, batch.SpeculatingBatch)
        if tokens_BL.shape[1] > 1 and running.decoding:
            self.seen.append((tokens_BL.shape[0], running._unread is not None))
        self.farthest = max(self.farthest, cast(int, cache[0].offset.max().item()) + tokens_BL.shape[1])
        return super().__call__(tokens_BL, cache)

    @classmethod
    def of(cls, bench: Bench) -> "Witness":
        spy = cls.inside(bench)
        spy.bench, spy.seen, spy.farthest = bench, [], 0
        return spy


@pytest.mark.parametrize("name", ["llama", "qwen3 8"])
def test_the_next_step_is_given_out_before_one_that_checks_is_read(model_of: Model, name: str) -> None:
    """Rows of unequal luck and length: some leave while a step is unread, one joins, and the others go on."""
    plain, draw = Bench(model_of(name)), random.Random(1)
    sizes = (60, 90, 120, 150, 70)
    sampled = float(name == "llama")  # positions, of which noise is made, are then the device's to know
    rows = [
        spec(f"s{at}", prompt_of(9, seed=at), max_tokens=size, temperature=sampled) for at, size in enumerate(sizes)
    ]
    rows = predicted(plain, *rows)
    rows = [structs.replace(row, prediction_ids=guess(list(row.prediction_ids), 0.8, draw)) for row in rows]
    at_once, bench = (
        Bench(model_of(name), speculation=replace(ALWAYS, own_text=False, overlaps=overlaps))
        for overlaps in (False, True)
    )
    witnesses = [Witness.of(each) for each in (at_once, bench)]
    for each in (at_once, bench):
        each.submit(*rows[:4])
        for _ in range(9):
            each.turn()
        each.submit(rows[4])
        each.run()
        assert [each.tokens(row.id) for row in rows] == [plain.tokens(row.id) for row in rows]
    of_rows = [[count for count, is_unread in witness.seen if is_unread] for witness in witnesses]
    assert not of_rows[0] and 2 * len(of_rows[1]) > len(witnesses[1].seen) and {2, 3, 4, 5} <= set(of_rows[1])
    stats, other = (each.engine.stats().speculation for each in (bench, at_once))
    assert stats.accepted > 0.9 * other.accepted and stats.steps < 1.1 * other.steps
    told_of = sum(bench.finish(row.id).accepted_prediction_tokens for row in rows)
    assert 0 <= stats.accepted - told_of <= 5 * len(rows), "all but what lies behind the rows' ends"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each step with drafts is."""
    seen, checks, only_reads = list[str](), Drafting.checks, Drafting.only_reads

    def checking(drafting: Drafting, width: int, step: Step = "checks") -> None:
        seen.append(step)
        checks(drafting, width, step)

    def reading(drafting: Drafting) -> None:
        seen.append("reads")
        only_reads(drafting)

    monkeypatch.setattr(Drafting, "checks", checking)
    monkeypatch.setattr(Drafting, "only_reads", reading)
    return seen


def test_a_check_stays_unread_from_the_first_one_on_whatever_the_rows_before_were_like(
    llama: LoadedModel, steps: list[str]
) -> None:
    """Short ones end before a step can follow the one that begins: after that others are read at once for a while."""
    sizes = {"s0": 8, "s1": 8, "s2": 60, "s3": 60}
    rows = predicted(Bench(llama), *(spec(name, prompt_of(9, seed=n), max_tokens=n) for name, n in sizes.items()))
    bench = Bench(llama, speculation=replace(ALWAYS, own_text=False, memory_bytes=0))
    for some, seen in ((rows[:2], ["begins", "reads"]), (rows[2:], ["begins", "follows", "follows"])):
        steps.clear()
        bench.submit(*some)
        bench.run()
        assert steps[: len(seen)] == seen
    assert [bench.tokens(each.id) for each in rows] == [list(each.prediction_ids) for each in rows]


def test_checks_stay_unread_after_one_behind_which_none_was_tried(
    llama: LoadedModel, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That nothing follows it, since a step without drafts is to be timed, says nothing of what there is to draft."""
    rows = predicted(Bench(llama), *(spec(f"s{at}", prompt_of(9, seed=at), max_tokens=60) for at in range(3)))
    bench, tries = Bench(llama, speculation=replace(ALWAYS, own_text=False, memory_bytes=0)), Drafting.tries
    monkeypatch.setattr(Drafting, "tries", lambda *args, **how: steps != ["begins"] and tries(*args, **how))
    bench.submit(*rows)
    bench.run()
    assert steps[:5] == ["begins", "reads", "begins", "follows", "follows"]
    assert [bench.tokens(each.id) for each in rows] == [list(each.prediction_ids) for each in rows]


def test_where_drafts_have_lost_more_than_they_brought_the_first_check_is_read_at_once(
    llama: LoadedModel, steps: list[str]
) -> None:
    rows = predicted(Bench(llama), *(spec(f"s{at}", prompt_of(9, seed=at), max_tokens=200) for at in range(3)))
    for lost in (0.0, 1.0):
        bench, now = Bench(llama, speculation=replace(ALWAYS, own_text=False, adapts_to_time=True)), count()
        bench.engine.drafting._clock = lambda now=now: float(next(now))
        bench.engine.drafting._accounts.of(len(rows), has_texts=True)._steps -= lost
        steps.clear()
        bench.submit(*rows)
        bench.run()
        assert steps[:2] == (["checks", "begins"] if lost else ["begins", "follows"])


@pytest.mark.parametrize("by", ["prediction", "memory"])
def test_rows_with_a_text_do_not_wait_for_what_those_without_one_have_lost(
    llama: LoadedModel, steps: list[str], by: str
) -> None:
    """As in a job's second epoch, behind a first one in which nothing was to be drafted from."""
    rows, again = (
        [spec(f"{name}{at}", prompt_of(9, seed=at), max_tokens=60) for at in range(3)] for name in ("s", "again ")
    )
    bench, now = Bench(llama, speculation=replace(ALWAYS, own_text=False, adapts_to_time=True)), count()
    if by == "prediction":
        rows = predicted(Bench(llama), *rows)
    else:
        bench.submit(*rows)
        bench.run()
        rows = again
    drafting = bench.engine.drafting
    drafting._clock = lambda: float(next(now))
    lost = drafting._accounts.of(len(rows), has_texts=False)
    lost._add(-100.0)
    steps.clear()
    bench.submit(*rows)
    bench.run()
    assert steps and drafting._has_texts and lost._steps < -90
    assert bench.engine.stats().speculation.accepted > 100


def test_drafts_are_charged_to_what_allowed_them_whoever_has_come_or_left_since() -> None:
    """As if rows without texts joined whenever a check is read."""
    now = [0.0]
    drafting = Drafting(SpeculationConfig(), [BatchKVCache([0])], clock=lambda: now[0], on_cpu=False)

    def begin(*, has_texts: bool) -> None:
        drafting.begin(4, alone=True, hurried=False)
        drafting._has_texts = has_texts

    def end(seconds: float) -> None:
        drafting.told(4)
        now[0] += seconds

    for at in range(20):
        begin(has_texts=at % 2 == 0)
        end(1.0)
    texts, others = (drafting._accounts.of(4, has_texts=each) for each in (True, False))
    for checks in count():
        begin(has_texts=True)
        if texts.is_spent or checks == 100:
            break
        drafting.checks(8, "begins")
        end(1.5)
        begin(has_texts=False)
        drafting.only_reads()
        end(1.5)
        for _ in range(3):  # timed anew, as after a loss
            begin(has_texts=True)
            end(1.0)
    assert 2 < checks < 10 and others._steps > AT_FIRST


def test_rows_with_a_text_begin_with_what_is_known_of_such_rows(llama: LoadedModel) -> None:
    copying, foretold = spec("own", [5, 6, 7] * 8, max_tokens=40), spec("foretold", prompt_of(9), max_tokens=40)
    for has_text, rows in ((False, [copying]), (True, predicted(Bench(llama), foretold))):
        bench = Bench(llama, speculation=replace(ALWAYS, memory_bytes=0))
        bench.submit(*rows)
        bench.run()
        chances = bench.engine.drafting._texts._chances
        assert chances[has_text].known != FIRST_CHANCE and chances[not has_text].known == FIRST_CHANCE


def test_long_prompts_of_new_rows_are_looked_at_over_several_steps(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's hash takes as long as the prompt is; of rows that have left nothing is known."""
    hashed, looks = Counter[str](), list[int]()

    def counted(each: SequenceSpec) -> bytes:
        hashed[each.id] += 1
        return key_of(each)

    def of_most(texts: Texts, rows: list[Row]) -> bool:
        before = hashed.total()
        most = look(texts, rows)
        looks.append(hashed.total() - before)
        return most

    look = Texts.of_most
    monkeypatch.setattr(source, "key_of", counted)
    monkeypatch.setattr(source, "NEW_AT_ONCE", 20)
    monkeypatch.setattr(Texts, "of_most", of_most)
    bench = Bench(llama, speculation=replace(ALWAYS, own_text=False))
    rows = [spec(f"s{at}", prompt_of(16, seed=at), max_tokens=20) for at in range(6)]
    bench.submit(*rows)
    bench.run()
    assert max(looks) == 2 and hashed == {row.id: 1 for row in rows}
    assert not bench.engine.drafting._texts._known


def test_a_check_that_stays_unread_tells_what_it_is_fed(llama: LoadedModel, steps: list[str]) -> None:
    """On a GPU a row's first token is under way then."""
    (row,) = predicted(Bench(llama), spec("s", prompt_of(9), max_tokens=60))
    bench = Bench(llama, speculation=replace(ALWAYS, own_text=False, memory_bytes=0))
    bench.engine._batch._tells_at_once = False
    bench.submit(row)
    bench.until(lambda: bool(steps))
    assert steps == ["begins"] and bench.tokens("s") == list(row.prediction_ids[:1])
    bench.run()
    assert bench.tokens("s") == list(row.prediction_ids)


BESIDE = replace(ALWAYS, own_text=False, memory_bytes=0, reads_beside=True)


def test_a_step_is_read_and_told_while_the_next_one_is_given_out(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = predicted(Bench(llama), *(spec(f"s{at}", prompt_of(9, seed=at), max_tokens=60) for at in range(3)))
    bench, give_out, foresee, draft = (
        Bench(llama, speculation=BESIDE),
        Unread.give_out,
        Drafting.foresee,
        drafting.draft,
    )
    looked, waited, drafts = threading.Event(), list[bool](), count()

    def behind_the_other(step: Unread, next_B: mx.array) -> None:
        before = cast(batch.SpeculatingBatch, bench.engine._batch)._unread
        if before is not None and before is not step:
            waited.append(looked.wait(HANG_S))
            looked.clear()
        give_out(step, next_B)

    def beside(drafting: Drafting, rows: Sequence[Row], behind: int) -> None:
        foresee(drafting, rows, behind)
        looked.set()

    monkeypatch.setattr(Unread, "give_out", behind_the_other)
    monkeypatch.setattr(Drafting, "foresee", beside)
    monkeypatch.setattr(drafting, "draft", lambda *args: (next(drafts), draft(*args))[1])
    bench.submit(*rows)
    bench.run()
    assert [bench.tokens(each.id) for each in rows] == [list(each.prediction_ids) for each in rows]
    assert len(waited) > 5 and all(waited)
    assert next(drafts) < len(rows) * (len(waited) + 4), "what was looked for beside is not looked for again"


def test_what_is_told_while_a_step_fails_to_be_given_out_is_told_once(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row ends by what is told then, and the others behind it."""
    sizes = (22, 60, 60)
    rows = predicted(Bench(llama), *(spec(f"s{at}", prompt_of(9, seed=at), max_tokens=n) for at, n in enumerate(sizes)))
    bench, give_out, given = Bench(llama, speculation=BESIDE), Unread.give_out, count()

    def failing(step: Unread, next_B: mx.array) -> None:
        if next(given) == 4:
            raise RuntimeError("no memory is left")
        give_out(step, next_B)

    monkeypatch.setattr(Unread, "give_out", failing)
    bench.submit(*rows)
    bench.run()
    for each in rows:
        tokens = bench.tokens(each.id)
        assert 18 < len(tokens) < 40 and tokens == list(each.prediction_ids)[: len(tokens)]
    assert [bench.finish(each.id).reason for each in rows] == ["length", "error", "error"]


def test_a_row_that_cannot_be_told_of_ends_and_those_before_it_have_been_told(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's error may come when log-probabilities are read: behind a row's last token, amid another's."""
    rows = predicted(Bench(llama), *(spec(f"s{at}", prompt_of(9, seed=at), max_tokens=13) for at in range(3)))
    bench, logprob, left = Bench(llama, speculation=BESIDE), Draw.logprob, count(-15)

    def failing(draw: Draw, index: int) -> float:
        if len(bench.engine._rows["s0"].tokens) == 13 and next(left) == -13:
            raise RuntimeError("the device has failed")
        return logprob(draw, index)

    monkeypatch.setattr(Draw, "logprob", failing)
    bench.submit(*rows)
    bench.run()
    assert [bench.finish(each.id).reason for each in rows] == ["length", "error", "error"]
    assert not bench.engine.has_rows and not bench.engine.busy
    for each in rows:
        tokens = bench.tokens(each.id)
        assert tokens == list(each.prediction_ids)[: len(tokens)]


def test_what_is_told_before_rows_fail_to_be_set_aside_is_told_once(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = predicted(Bench(llama), *(spec(f"s{at}", prompt_of(9, seed=at), max_tokens=40) for at in range(2)))
    bench = Bench(llama, speculation=BESIDE)
    bench.submit(*rows)
    bench.until(lambda: len(bench.tokens("s0")) > 12)  # a step is unread
    before = [len(bench.tokens(each.id)) for each in rows]

    def failing(*args: object) -> None:
        raise RuntimeError("no memory is left")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(Keeping, "prompts", failing)
        bench.engine.set_aside([each.id for each in rows])
    bench.engine.cancel("s0")
    bench.run()
    assert [bench.finish(each.id).reason for each in rows] == ["cancelled", "length"]
    assert len(bench.tokens("s0")) > before[0] and bench.tokens("s1") == list(rows[1].prediction_ids)


@pytest.mark.parametrize("size", [30, 52])
def test_a_step_that_checks_feeds_nothing_behind_the_context(llama: LoadedModel, size: int) -> None:
    short = replace(llama, card=structs.replace(llama.card, context_length=60))
    plain = Bench(short)
    sizes = [size, 4, 4, 4]  # the first one is at its end while the others have many tokens before them
    each = [spec(f"s{at}", prompt_of(size, seed=at), max_tokens=60 - size) for at, size in enumerate(sizes)]
    rows = predicted(plain, *each)
    bench = Bench(short, speculation=ALWAYS)
    witness = Witness.of(bench)
    bench.submit(*rows)
    bench.run()
    assert [bench.tokens(each.id) for each in rows] == [plain.tokens(each.id) for each in rows]
    assert 50 < witness.farthest <= 60 and (size > 50 or any(is_unread for _, is_unread in witness.seen))


class Zeros(SpiedModel):
    """A model of which the last row says 0 half of the time."""

    def __call__(self, tokens_BL: mx.array, cache: list[Any]) -> mx.array:
        logits = super().__call__(tokens_BL, cache)
        logits[-1, :, 0] = mx.logsumexp(logits[-1], axis=-1)
        return logits


def test_what_fills_the_places_of_a_shorter_draft_never_holds(llama: LoadedModel) -> None:
    rows = [spec(f"s{at}", prompt_of(9, seed=at), max_tokens=60, temperature=1.0, seed=at) for at in range(3)]
    told = []
    for speculation in (None, replace(ALWAYS, own_text=False, memory_bytes=0)):
        bench = Bench(llama, speculation=speculation)
        Zeros.inside(bench)
        bench.submit(*rows)
        bench.run()
        told.append([bench.tokens(row.id) for row in rows])
        rows[:2] = [
            structs.replace(row, prediction_ids=tuple(each)) for row, each in zip(rows, told[0][:2], strict=False)
        ]
    stats = bench.engine.stats().speculation
    assert told[1] == told[0] and 15 < told[1][2].count(0) < 45
    assert stats.accepted == stats.drafted > 80 and not bench.finish("s2").accepted_prediction_tokens


def test_each_forward_of_rows_that_decode_is_a_step_though_it_may_tell_nothing(llama: LoadedModel) -> None:
    """As one does that follows a step with drafts: it feeds what has been told already."""
    (row,) = predicted(Bench(llama), spec("s", prompt_of(9), max_tokens=40, temperature=1.0))
    bench = Bench(llama, speculation=replace(ALWAYS, own_text=False))
    spy = SpiedModel.inside(bench)
    bench.submit(structs.replace(row, prediction_ids=row.prediction_ids[:12]))
    bench.run()
    prompt, first, *decoded = spy.fed
    assert (prompt, first) == (8, 1) and 1 in decoded and max(decoded) > 1
    assert bench.engine.stats().steps == len(decoded)


def test_layers_that_we_do_not_know_get_no_drafts(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.model, "make_cache", lambda: [ConcatenateKVCache()] * 2, raising=False)
    stats = Bench(llama, speculation=ALWAYS).engine.stats().speculation
    assert not stats.is_on and stats.drafted == 0


def test_a_prompt_that_comes_again_is_drafted_from_what_was_written_for_its_tenant_only(llama: LoadedModel) -> None:
    bench = Bench(llama, speculation=ALWAYS, prefix_cache_bytes=0)
    of_a = msgspec.structs.replace(spec("a", prompt_of(9), max_tokens=40, temperature=1.0, seed=5), tenant="a")
    accepted: dict[str, int] = {}
    for seq, tenant in (("a", "a"), ("b", "b"), ("again", "a")):
        before = bench.engine.stats().speculation.accepted
        bench.submit(msgspec.structs.replace(of_a, id=seq, tenant=tenant))
        bench.run()
        accepted[seq] = bench.engine.stats().speculation.accepted - before
    assert bench.tokens("a") == bench.tokens("b") == bench.tokens("again")
    assert accepted["b"] == accepted["a"], "what another tenant has written shows in nothing"
    assert accepted["again"] > 30


def test_a_short_answer_that_comes_again_takes_one_step_behind_its_first_token(llama: LoadedModel) -> None:
    bench = Bench(llama, speculation=ALWAYS, prefix_cache_bytes=0)
    first = spec("first", prompt_of(9), max_tokens=9, temperature=1.0, seed=5)
    bench.submit(first)
    bench.run()
    end = bench.tokens("first")[4]
    assert end not in bench.tokens("first")[:4], "else it would end sooner"
    stops = structs.replace(first.sampling, stop_token_ids=(end,))
    spy = SpiedModel.inside(bench)
    before = bench.engine.stats().speculation.drafted
    bench.submit(structs.replace(first, id="again", sampling=stops))
    bench.run()
    assert bench.tokens("again") == bench.tokens("first")[:5] and bench.finish("again").reason == "stop"
    assert spy.fed == [8, 1, 4], "its prompt, the first token, three more; the end is drawn behind them"
    assert bench.engine.stats().speculation.drafted == before + 3


def test_short_sequences_that_come_and_go_all_the_time_are_drafted_for(llama: LoadedModel) -> None:
    bench = Bench(llama, speculation=SpeculationConfig(memory_bytes=1 << 20), prefix_cache_bytes=0)
    for at in range(60):
        bench.submit(spec(f"s{at}", prompt_of(9), max_tokens=6, temperature=1.0, seed=5))
        bench.turn()
        bench.turn()
    bench.run()
    assert bench.engine.stats().speculation.accepted > 0


def test_a_batch_larger_than_the_bound_gets_no_drafts(llama: LoadedModel) -> None:
    bench = Bench(llama, speculation=replace(ALWAYS, most_rows=2))
    bench.submit(*(spec(f"s{at}", [1, 2, 1, 2, 1], max_tokens=20) for at in range(3)))
    bench.run()
    assert bench.engine.stats().speculation.drafted == 0


def test_what_a_batch_larger_than_the_bound_has_written_is_kept(llama: LoadedModel) -> None:
    bench = Bench(llama, speculation=replace(ALWAYS, most_rows=2, own_text=False))
    rows = [spec(f"s{at}", prompt_of(9, seed=at), max_tokens=20, temperature=1.0) for at in range(3)]
    bench.submit(*rows)
    bench.run()
    bench.submit(structs.replace(rows[0], id="again"))
    bench.run()
    assert bench.tokens("again") == bench.tokens("s0") and bench.engine.stats().speculation.accepted > 12


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen3 8", "gemma3_text", "qwen3_5"])
def test_rows_that_are_fast_by_turns_pile_up_no_padding(model_of: Model, name: str) -> None:
    plain = Bench(model_of(name))
    rows = predicted(plain, *(spec(f"s{at}", prompt_of(9, seed=at), max_tokens=60) for at in range(2)))
    for at, each in enumerate(rows):
        turns = [id_ if (place // 12) % 2 == at else 250 for place, id_ in enumerate(each.prediction_ids)]
        rows[at] = structs.replace(each, prediction_ids=tuple(turns))
    bench = Bench(model_of(name), speculation=replace(ALWAYS, own_text=False, memory_bytes=0, overlaps=False))
    bench.submit(*rows)
    running = bench.engine._batch
    assert isinstance(running, batch.SpeculatingBatch)
    aligned = 0
    while bench.engine._rows:
        bench.turn()
        if any(running._slack):
            aligned += 1
            with mx.stream(running.stream):
                running._align()
            assert not min(running._padding)
    assert aligned > 2 and [bench.tokens(each.id) for each in rows] == [plain.tokens(each.id) for each in rows]


@pytest.mark.parametrize(("in_place", "loose", "aligns"), [(False, 256, True), (True, 256, False), (True, 3, True)])
def test_rows_end_together_again_where_it_costs_to_write_them_apart(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, *, in_place: bool, loose: int, aligns: bool
) -> None:
    """Or where one keeps much room for another that is far behind."""
    monkeypatch.setattr(RowModel, "draws_in_place", lambda *_: in_place)
    monkeypatch.setattr(batch, "LOOSE", loose)
    plain = Bench(llama)
    rows = predicted(
        plain, *(spec(f"s{at}", prompt_of(70, seed=at), max_tokens=40, temperature=1.0) for at in range(2))
    )
    rows[0] = structs.replace(rows[0], prediction_ids=rows[0].prediction_ids[:12])
    rows[1] = structs.replace(rows[1], prediction_ids=())
    bench = Bench(llama, speculation=replace(ALWAYS, own_text=False, memory_bytes=0))
    slacks, align = [], batch.align
    monkeypatch.setattr(batch, "align", lambda caches: (slacks.append(list(running._slack)), align(caches)))
    running = bench.engine._batch
    assert isinstance(running, batch.SpeculatingBatch)
    bench.submit(*rows)
    bench.run()
    assert [bench.tokens(each.id) for each in rows] == [plain.tokens(each.id) for each in rows]
    assert len(slacks) == aligns and all(max(each) > 3 for each in slacks)


def test_a_failed_forward_ends_its_rows_and_the_next_ones_are_drafted_for(llama: LoadedModel) -> None:
    rows = predicted(Bench(llama), *(spec(f"s{at}", prompt_of(9, seed=at), max_tokens=30) for at in range(2)))
    bench = Bench(llama, speculation=ALWAYS)
    spy = SpiedModel.inside(bench)
    spy.fails = lambda tokens_BL: tokens_BL.shape == (1, 6)
    bench.submit(rows[0])
    bench.run()
    assert bench.finish("s0").reason == "error"
    spy.fails = lambda tokens_BL: False
    bench.submit(rows[1])
    bench.run()
    assert bench.tokens("s1") == list(rows[1].prediction_ids) and bench.engine.stats().speculation.accepted > 15


@pytest.fixture(scope="module")
def made(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, MadeAdapter]:
    return make_versions(llama, tmp_path_factory.mktemp("adapters"))


@pytest.mark.long
@pytest.mark.parametrize("policy", ["pin", "follow"])
def test_rows_of_several_adapters_are_drafted_for_while_a_version_is_loaded(
    llama: LoadedModel, made: dict[str, MadeAdapter], policy: Literal["pin", "follow"]
) -> None:
    names = ["", "a", "b@1"]
    rows = [
        msgspec.structs.replace(row(f"s{at}", prompt_of(9, seed=at), each, max_tokens=100), adapter_policy=policy)
        for at, each in enumerate(names)
    ]
    with AdapterBench(llama, made) as plain:
        plain.publish("a@1")
        plain.provide("b@1")
        plain.submit(*rows)
        plain.run()
    rows = [msgspec.structs.replace(each, prediction_ids=tuple(plain.tokens(each.id))) for each in rows]
    with AdapterBench(llama, made, speculation=ALWAYS) as bench:
        bench.run_amid_a_hot_load(rows)
        assert bench.engine.stats().speculation.accepted > 60
        assert ("a@2" in bench.versions("s1")) == (policy == "follow")


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "llama last-24", "qwen3_5", "mamba2", "falcon_h1"])
def test_a_next_turn_begins_with_kv_that_drafts_have_left(model_of: Model, name: str) -> None:
    """A stop string ends the row inside a draft, and rows of unequal luck end at different positions."""
    plain = Bench(model_of(name), prefix_cache_bytes=0)
    rows = predicted(plain, *(spec(f"s{at}", prompt_of(20 + at, seed=at), max_tokens=40) for at in range(3)))
    stop = bytes(each for each in rows[0].prediction_ids[17:19] if each < 256).decode(errors="ignore")
    rows[0] = structs.replace(rows[0], sampling=structs.replace(rows[0].sampling, stop=(stop,)))
    rows[1] = structs.replace(rows[1], prediction_ids=rows[1].prediction_ids[::2])
    bench = Bench(model_of(name), speculation=ALWAYS, block_size=4, prefix_cache_bytes=1 << 24)
    bench.submit(*rows)
    bench.run()
    assert bench.engine.stats().speculation.accepted > 40
    needs_states = bench.engine.prefixes.needs_snapshots
    for each in rows:
        context = [*each.prompt_ids, *bench.tokens(each.id), 7, 8]
        after = spec(f"{each.id}.next", context, max_tokens=12)
        for turn in (plain, bench):
            turn.submit(after)
            turn.run()
        if not (each is rows[0] and needs_states):  # its states may have read more than it has written
            assert bench.finish(after.id).cached_tokens > len(each.prompt_ids)
        assert bench.tokens(after.id) == plain.tokens(after.id)
        assert bench.logprobs(after.id) == pytest.approx(plain.logprobs(after.id), abs=CLOSE)
