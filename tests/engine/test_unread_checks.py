"""A check stays unread while the next one is given out, and no token depends on it; which checks do."""

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache
from msgspec import structs

from mlx_model.config import SpeculationConfig
from mlx_model.loader import LoadedModel
from mlx_model.sampling.draw import Draw
from shared.sequences import SequenceSpec
from tests.engine.conftest import Bench, SpiedModel, prompt_of, spec
from tests.engine.drafted import (
    ALWAYS,
    guess,
    predicted,
)
from tests.engine.kv_models import Model
from tests.waiting import HANG_S
from worker.engine.batch.keeping import Keeping
from worker.engine.batch.row import Row
from worker.engine.speculation import batch, source
from worker.engine.speculation.drafting import Drafting, Step
from worker.engine.speculation.memory import key_of
from worker.engine.speculation.part import Unread
from worker.engine.speculation.payoff import AT_FIRST, FIRST_CHANCE
from worker.engine.speculation.source import Source, Texts


class Witness(SpiedModel):
    """Notes of each forward how far it reads, and whether the step before has been read by then."""

    bench: Bench
    seen: list[tuple[int, bool]]  # rows of each forward of several ids
    farthest: int

    def __call__(self, tokens_BL: mx.array, cache: list[Any]) -> mx.array:
        running = self.bench.engine.batch
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
        bench.engine.drafting.account(len(rows), has_texts=True).add(-lost)
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
    lost = drafting.account(len(rows), has_texts=False)
    lost.add(-100.0)
    steps.clear()
    bench.submit(*rows)
    bench.run()
    assert steps and drafting.has_texts and lost.steps < -90
    assert bench.engine.stats().speculation.accepted > 100


def test_drafts_are_charged_to_what_allowed_them_whoever_has_come_or_left_since() -> None:
    """As if rows without texts joined whenever a check is read."""
    now = [0.0]
    drafting = Drafting(SpeculationConfig(), [BatchKVCache([0])], clock=lambda: now[0], on_cpu=False)

    def begin(*, has_texts: bool) -> None:
        drafting.begin(4, alone=True, hurried=False)
        drafting.has_texts = has_texts

    def end(seconds: float) -> None:
        drafting.told(4)
        now[0] += seconds

    for at in range(20):
        begin(has_texts=at % 2 == 0)
        end(1.0)
    texts, others = (drafting.account(4, has_texts=each) for each in (True, False))
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
    assert 2 < checks < 10 and others.steps > AT_FIRST


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
    bench.engine.batch._tells_at_once = False
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
        Source.draft,
    )
    looked, waited, drafts = threading.Event(), list[bool](), count()

    def behind_the_other(step: Unread, next_B: mx.array) -> None:
        before = cast(batch.SpeculatingBatch, bench.engine.batch)._unread
        if before is not None and before is not step:
            waited.append(looked.wait(HANG_S))
            looked.clear()
        give_out(step, next_B)

    def beside(drafting: Drafting, rows: Sequence[Row], behind: int) -> None:
        foresee(drafting, rows, behind)
        looked.set()

    monkeypatch.setattr(Unread, "give_out", behind_the_other)
    monkeypatch.setattr(Drafting, "foresee", beside)
    monkeypatch.setattr(Source, "draft", lambda *args: (next(drafts), draft(*args))[1])
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
        if len(bench.engine.rows["s0"].tokens) == 13 and next(left) == -13:
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
