"""Whether rows get drafts, and how long ones, where a step takes what is set: real drafts and a clock, no model."""

import io
import random
from collections.abc import Callable, Sequence
from statistics import fmean, quantiles
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_model.config import SpeculationConfig
from mlx_model.kv.kinds import ragged, take_back
from shared.sequences import SamplingParams, SequenceSpec
from worker.engine.batch.row import Row
from worker.engine.messages import RowRequest
from worker.engine.speculation.drafting import Drafting, Step
from worker.engine.speculation.memory import ANCHOR, FARTHEST, Completions, key_of
from worker.engine.speculation.payoff import SILENT

VOCAB, TOKENS, NOISE = 5000, 128, 0.05


class Guesser:
    """A draft model beside a world's rows, as `DraftBatch`, which has read every prompt."""

    name, feeds = "guesser", False

    def __init__(self, world: "World", chance: float, takes: float) -> None:
        self._world, self._chance, self._takes = world, chance, takes
        self.rows: list[Row] = []
        self.add = self.rows.append

    def __contains__(self, row: Row) -> bool:
        return row in self.rows

    def __len__(self) -> int:
        return len(self.rows)

    def length(self, _: Row) -> int:
        return 64

    def room(self, _: Row) -> int:
        return 10**6

    def remove(self, gone: set[Row]) -> None:
        self.rows[:] = [row for row in self.rows if row not in gone]

    def drafts(self, _: Any, lengths: dict[Row, int]) -> dict[Row, list[int]]:
        return self._world.guesses(lengths, self._chance, self._takes)


class World:
    """Rows of one batch on a GPU; a step of width w > 1 takes 1 + fixed + slope * (w - 1), give or take a little."""

    def __init__(
        self,
        chances: Sequence[float | None],
        slope: float,
        fixed: float = 0.0,
        *,
        overlaps: bool = False,
        idles: float = 0.25,
        asking: float = 0.0,
        kept: int = 0,
        model: tuple[float, float] | None = None,
        busy: Sequence[range] = (),
        seed: int = 0,
        adapts: bool = True,
    ) -> None:
        """`chances`: that a token of a row's prediction is right; None: it has none. `busy`: steps that take thrice.

        `overlaps`: a step that checks drafts is read behind the next one, or behind nothing. `idles`: by so much longer
        takes a step that has waited for what it is fed, and then checks nothing. `asking`: what it takes to ask all
        rows for drafts. `kept`: bytes of what others write. `model`: that a token of a draft model is right, and what
        its forward takes. `adapts`: the clock decides, and not the configuration.
        """
        self._draw = random.Random(len(chances) + 1000 * seed)
        self._slope, self._fixed = slope, fixed
        self._now = 0.0
        self._overlaps, self._idles, self._busy = overlaps, idles, busy
        self._unread: list[list[int]] | None = None  # the drafts of a step that has not been read
        self.asked = 0  # steps in which rows were asked for drafts
        drafts_by: Any = None if model is None else Guesser(self, *model)
        config = SpeculationConfig(5, memory_bytes=kept, adapts_to_time=adapts)
        self.looks = 0  # at the clock
        self._drafting = Drafting(config, [KVCache()], drafts_by, self._clock, on_cpu=False)
        self._suggested, self._asking = self._drafting._suggested, asking
        self._drafting._suggested = self._ask  # type: ignore[method-assign]
        self._written: dict[Row, list[int]] = {}
        for at, chance in enumerate(chances):
            written = [self._id() for _ in range(TOKENS + 6)]
            guess = tuple(id_ if self._draw.random() < (chance or 0) else self._id() for id_ in written[:TOKENS])
            guess = () if chance is None else guess
            written += [0] * 6  # which a step may reach, and nobody foretells
            prompt, sampling = tuple(self._id() for _ in range(64)), SamplingParams(TOKENS, at, ignore_eos=True)
            row = Row(RowRequest(SequenceSpec(str(at), "m", prompt, sampling, prediction_ids=guess)), frozenset(), None)
            row.position = 1
            self._written[row] = written
        self.steps: list[float] = []
        self._known = False

    def _clock(self) -> float:
        self.looks += 1
        return self._now

    def guesses(self, lengths: dict[Row, int], chance: float, takes: float) -> dict[Row, list[int]]:
        """So many ids behind what rows are fed, each right by that chance; a forward of all rows takes so long."""
        self._now += takes * max(lengths.values())
        behind = {row: self._written[row][row.position : row.position + count] for row, count in lengths.items()}
        return {
            row: [id_ if self._draw.random() < chance else self._id() for id_ in ids] for row, ids in behind.items()
        }

    def _id(self) -> int:
        return self._draw.randrange(VOCAB)

    def _ask(self, rows: Sequence[Row]) -> list[list[int]]:
        self._now += self._asking
        return self._suggested(rows)

    def run(self) -> float:
        """To the end of all rows; how much sooner that comes than without drafts."""
        while self._written:
            rows, began = list(self._written), self._now
            told = sum(len(row.tokens) for row in rows)
            self._drafting.begin(len(rows), alone=True, hurried=False)
            if self._unread is not None:
                self._go_on(rows, self._unread)
            else:
                drafts = self._drafts(rows)
                width = 1 + max(len(draft) for draft in drafts)
                if width > 1 and self._overlaps and (self._known or not self._drafting.owes):
                    for row in rows:
                        self._tell(row, row.position)
                    self._unread = drafts
                    self._drafting.checks(width, "begins")
                else:
                    if width > 1:
                        self._drafting.checks(width)
                    self._check(rows, drafts)
                    self._known = width > 1
            self.steps.append(self._now - began)
            self._drafting.told(sum(len(row.tokens) for row in rows) - told)
            gone = [row for row in rows if len(row.tokens) >= TOKENS]
            self._drafting.remove(gone)
            if self._unread is not None:
                self._unread = [each for each, row in zip(self._unread, rows, strict=True) if row not in gone] or None
            self._written = {row: ids for row, ids in self._written.items() if row not in gone}
        return TOKENS / self._now

    def _drafts(self, rows: list[Row]) -> list[list[int]]:
        if not self._drafting.tries(rows, known=self._known):
            return [[] for _ in rows]
        self.asked += 1
        inputs = [self._written[row][row.position - 1] for row in rows]
        drafts = self._drafting.drafts(rows, inputs)
        if not (self._known or any(drafts)):
            self._now += self._idles
        return drafts

    def _go_on(self, rows: list[Row], drafts: list[list[int]]) -> None:
        """Read a step, behind another one if its rows go on."""
        width = 1 + max(len(draft) for draft in drafts)
        guesses, length = [list[int]() for _ in rows], 0
        if self._drafting.tries(rows, known=True):
            guesses, length = self._drafting.ahead(rows, [width] * len(rows))
        held = self._check(rows, drafts)
        for row in rows:
            self._tell(row, row.position)
        if length:
            self._drafting.checks(1 + length, "follows")
            self._unread = [ids[each + 1 : each + 1 + length] for ids, each in zip(guesses, held, strict=True)]
        else:
            self._drafting.only_reads()
            self._unread, self._known = None, True

    def _check(self, rows: list[Row], drafts: list[list[int]]) -> list[int]:
        """Let the time of such a step pass; how much has held of each draft."""
        width = 1 + max(len(draft) for draft in drafts)
        held = [self._move(row, draft) for row, draft in zip(rows, drafts, strict=True)]
        takes = 1 + self._fixed * (width > 1) + self._slope * (width - 1)
        takes *= 3 if any(len(self.steps) in steps for steps in self._busy) else 1
        self._now += takes * self._draw.lognormvariate(0, NOISE)
        if width > 1:
            results = [(row, len(draft), each) for row, draft, each in zip(rows, drafts, held, strict=True)]
            self._drafting.checked(width, results)
        return held

    def _move(self, row: Row, draft: list[int]) -> int:
        ids, at = self._written[row], row.position
        held = next((step for step, id_ in enumerate(draft) if id_ != ids[at + step]), len(draft))
        self._tell(row, at + held)
        row.position += held + 1
        return held

    def _tell(self, row: Row, end: int) -> None:
        row.tokens += self._written[row][len(row.tokens) : end]


@pytest.mark.parametrize(("rows", "slope"), [(1, 0.15), (1, 0.5), (8, 0.25), (32, 0.05), (32, 0.45), (32, 1.0)])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_are_never_a_loss(rows: int, slope: float, chance: float, *, overlaps: bool) -> None:
    worlds = [World([chance] * rows, slope, overlaps=overlaps, idles=0.8, seed=seed) for seed in range(3)]
    assert fmean(world.run() for world in worlds) > 0.94


@pytest.mark.parametrize(("rows", "slope", "least"), [(1, 0.15, 2.0), (8, 0.25, 1.4), (32, 0.05, 2.5)])
@pytest.mark.parametrize("overlaps", [False, True])
def test_copies_come_sooner(rows: int, slope: float, least: float, *, overlaps: bool) -> None:
    assert World([1.0] * rows, slope, overlaps=overlaps).run() > least


@pytest.mark.parametrize(("rows", "chance", "least"), [(8, 0.7, 1.15), (8, 1.0, 2.2), (32, 1.0, 2.2)])
def test_drafts_of_several_tokens_pay_where_those_of_one_do_not(rows: int, chance: float, least: float) -> None:
    """As on a GPU, where a step that checks drafts takes more by itself; the best of these is 1.5 and 3.1."""
    assert World([chance] * rows, 0.05, fixed=0.7).run() > least


@pytest.mark.parametrize(("rows", "chance", "fixed", "least"), [(32, 0.7, 0.3, 1.28), (8, 0.5, 0.2, 1.08)])
def test_rows_gain_though_some_of_them_pause(rows: int, chance: float, fixed: float, least: float) -> None:
    """Until all are over; a row that paused, or whose first draft was wrong, used to stop all others."""
    assert World([chance] * rows, 0.02, fixed=fixed).run() > least


def test_a_busy_moment_of_the_machine_does_not_end_drafts() -> None:
    """Steps are counted, and not their time, which is the moment's, too."""
    taken = {"busy": 0, "quiet": 0}
    for seed in range(4):
        for name, busy in (("busy", [range(14, 20)]), ("quiet", [])):
            world = World([0.7] * 8, 0.02, fixed=0.4, busy=busy, seed=seed)
            world.run()
            taken[name] += len(world.steps)
    assert taken["busy"] < 1.2 * taken["quiet"], taken


def test_busy_moments_in_which_a_length_is_first_timed_do_not_rule_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of thirteen take thrice; with what two of those told, drafts of one token were made for 200 steps."""
    monkeypatch.setattr(f"{__name__}.TOKENS", 384)
    taken = {"busy": 0, "quiet": 0}
    for seed in (3, 4, 6, 7):
        for name, busy in (("busy", [range(at, at + 2) for at in range(7, 500, 13)]), ("quiet", [])):
            world = World([0.7] * 32, 0.02, fixed=0.05, overlaps=True, busy=busy, seed=seed)
            world.run()
            taken[name] += len(world.steps)
    assert taken["busy"] < 1.15 * taken["quiet"], taken


@pytest.mark.parametrize(("rows", "fixed", "most"), [(8, 0.4, 1.2), (32, 0.3, 1.3)])
def test_a_machine_that_turns_slow_does_not_end_drafts(rows: int, fixed: float, most: float) -> None:
    """All steps take thrice from the twentieth on; what those without drafts took before is no measure any more."""
    taken = {"slow": 0, "quiet": 0}
    for seed in range(4):
        for name, busy in (("slow", [range(20, 10**6)]), ("quiet", [])):
            world = World([0.7] * rows, 0.02, fixed=fixed, busy=busy, seed=seed)
            world.run()
            taken[name] += len(world.steps)
    assert taken["slow"] < most * taken["quiet"], taken


def test_rows_for_which_nothing_suggests_itself_are_seldom_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = [0], Drafting._draft

    def counted(self: Drafting, *row: Any) -> list[int]:
        looks[0] += 1
        return look(self, *row)

    monkeypatch.setattr(f"{__name__}.VOCAB", 10**8)  # no id comes twice
    monkeypatch.setattr(Drafting, "_draft", counted)
    World([None] * 4, 0.1).run()
    assert 4 * SILENT < looks[0] < 4 * TOKENS / 2


def test_asking_many_rows_in_vain_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.4 ms for 32 rows, of a step of 3.7 ms on a GPU: asked in every fourth step they came at 0.965 to 0.974."""
    monkeypatch.setattr(f"{__name__}.VOCAB", 10**8)
    assert World([None] * 32, 0.02, fixed=0.3, asking=0.11).run() > 0.985


def test_steps_in_which_nothing_is_asked_do_not_even_look_at_the_clock() -> None:
    world = World([None] * 32, 0.02, fixed=0.3, asking=0.11)
    world.run()
    assert 0 < world.looks < TOKENS


def in_a_silence(world: World, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let that happen once while rows are not asked for long; after how many steps, once it has."""
    drafting, told, came = world._drafting, world._drafting.told, list[int]()

    def tell(tokens: int) -> None:
        told(tokens)
        if not came and len(world.steps) > TOKENS // 3 and drafting._asks_at > drafting._step + 4:
            came.append(len(world.steps))
            act()

    monkeypatch.setattr(drafting, "told", tell)
    return came


@pytest.mark.parametrize("alone", [True, False])
def test_rows_that_come_in_a_silence_are_asked_at_once(*, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there were, or in the place of others: then a prompt has been fed beside the step before."""
    monkeypatch.setattr(f"{__name__}.VOCAB", 10**8)
    world, late = World([None] * 8, 0.02, asking=0.11), World([1.0] * 8, 0.02, seed=1)
    drafting = world._drafting
    begin, drafts = drafting.begin, world._drafts

    def come() -> None:
        world._written = {**(world._written if alone else {}), **late._written}

    def begun(rows: int, **_: bool) -> None:
        begin(rows, alone=alone or came != [len(world.steps)], hurried=False)

    def asked(rows: list[Row]) -> list[list[int]]:
        given = drafts(rows)
        if came and any(given):
            raise StopIteration
        return given

    came = in_a_silence(world, come, monkeypatch)
    monkeypatch.setattr(drafting, "begin", begun)
    monkeypatch.setattr(world, "_drafts", asked)
    with pytest.raises(StopIteration):
        world.run()
    assert len(world.steps) < came[0] + 6


def test_many_steps_at_once_are_timed_as_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs one behind another, that end amid a silence, and nothing to do for long between them."""
    monkeypatch.setattr(f"{__name__}.VOCAB", 10**8)
    monkeypatch.setattr(f"{__name__}.TOKENS", 120)
    world = World([None] * 32, 0.02, fixed=0.3, asking=0.11)
    drafting, began = world._drafting, [0]
    begin = drafting.begin

    def begun(rows: int, **_: bool) -> None:
        begin(rows, alone=len(world.steps) != began[0], hurried=False)
        if len(world.steps) > 8:
            assert drafting.account(32, has_texts=False).plain_s == pytest.approx(1.0, abs=0.06)

    monkeypatch.setattr(drafting, "begin", begun)
    for job in range(1, 5):
        world.run()
        assert drafting._times.usual(32, 1) == pytest.approx(0.98, abs=0.03)
        assert drafting.account(32, has_texts=False).steps == pytest.approx(
            3 + (0.01 * TOKENS - 0.11 * 6) * job, abs=0.5
        )
        world._written = World([None] * 32, 0.02, seed=job)._written
        world._now, began[0] = world._now + 100, len(world.steps)


def test_no_clock_decides_who_is_asked_where_ranks_run_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would check drafts in different steps, and wait for one another for ever."""
    monkeypatch.setattr(f"{__name__}.VOCAB", 300)
    steps = []
    for asking in (0.0, 0.4):
        world = World([None] * 2, 0.1, asking=asking, adapts=False)
        tries, tried = world._drafting.tries, []

        def noted(rows: Sequence[Row], *, known: bool, tries: Any = tries, tried: list[bool] = tried) -> bool:
            tried.append(tries(rows, known=known))
            return tried[-1]

        monkeypatch.setattr(world._drafting, "tries", noted)
        world.run()
        steps.append(tried)
    assert steps[0] == steps[1]
    assert 0 < sum(steps[0]) < len(steps[0]) / 2


def test_rows_are_asked_once_others_have_written_behind_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all rows of a batch, by another worker, after a third of their tokens and amid a long silence."""
    monkeypatch.setattr(f"{__name__}.VOCAB", 10**8)
    world = World([None] * 32, 0.02, fixed=0.3, asking=0.11, kept=1 << 24)

    def come() -> None:
        texts = [(row.spec, np.array(ids[:TOKENS], np.int32)) for row, ids in world._written.items()]
        world._drafting.remember([Completions(key_of(each), each.prompt_ids, [(b"", ids)]) for each, ids in texts])

    came = in_a_silence(world, come, monkeypatch)
    world.run()
    assert came and len(world.steps) < came[0] + (TOKENS - came[0]) / 3


def test_rows_that_do_not_pay_at_first_are_asked_in_every_step() -> None:
    """Their texts are right in 70%, and after their first drafts all seem poor: silence is that none has any."""
    assert World([0.7] * 32, 0.02, fixed=0.3, overlaps=True, asking=0.11, seed=6).run() > 1.2


@pytest.mark.parametrize("asking", [0.01, 0.11])
def test_rows_that_begin_to_copy_later_are_asked_in_time(asking: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 256 tokens each row says again what it has said; one that is asked ever more seldom would miss most."""
    monkeypatch.setattr(f"{__name__}.TOKENS", 512)
    monkeypatch.setattr(f"{__name__}.VOCAB", 10**8)
    world = World([None] * 8, 0.02, fixed=0.3, asking=asking)
    for row, ids in world._written.items():
        world._written[row] = [*ids[:256], *ids[:256], *ids[512:]]
    assert world.run() > 1.3


def test_what_waits_for_a_draft_model_cost_is_not_charged_to_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It rests for that, also where it was asked for rows that have drafts by their texts."""
    monkeypatch.setattr(f"{__name__}.TOKENS", 1024)
    worlds = [World([0.5] * 8, 0.1, fixed=0.3, idles=0.9, model=(0.3, 0.3), seed=seed) for seed in range(2)]
    assert all(world.run() > 1.01 for world in worlds)


def test_no_step_waits_for_what_it_is_fed_where_no_draft_would_pay() -> None:
    """A few at most, before that is known: what texts say behind the ids that are told is weighed first."""
    worlds = [World([0.3] * 32, 0.15, fixed=1.0, seed=seed) for seed in range(3)]
    assert all(world.run() > 0.95 and 0 < world.asked < 8 for world in worlds)


@pytest.mark.parametrize("idles", [0.3, 0.9])
def test_waiting_in_vain_for_what_steps_are_fed_costs_little(idles: float) -> None:
    """Among many rows some one's text seems to go on as it did, nearly always, and then does not."""
    world = World([None] * 32, 0.1, idles=idles)
    assert world.run() > 0.95
    assert world.asked > 2


@pytest.mark.parametrize("chance", [0.3, 0.7])
def test_what_drafts_take_at_all_is_found_out_without_a_loss(chance: float) -> None:
    assert fmean(World([chance] * 32, 0.15, fixed=1.0, seed=seed).run() for seed in range(3)) > 0.95


@pytest.mark.parametrize("rows", [1, 8])
def test_a_prediction_of_which_some_tokens_are_wrong_is_gone_along_with(rows: int) -> None:
    """The best is 2.9: five tokens in every step, each right in seven of ten."""
    assert World([0.7] * rows, 0.0).run() > 1.8


@pytest.mark.parametrize("slope", [0.1, 0.25])
def test_a_row_without_drafts_waits_little_longer_beside_rows_with_them(slope: float) -> None:
    beside = World([0.0, *[1.0] * 7], slope)
    beside.run()
    assert quantiles(beside.steps, n=20)[-1] < 1.1 * 1.1, "steps differ by the noise, too"


def test_steps_that_decode_no_row_tell_nothing_of_those_that_do() -> None:
    now = 0.0
    drafting = Drafting(SpeculationConfig(), [KVCache()], clock=lambda: now)
    for rows in (0, 0, 0, 2, 2, 2):
        drafting.begin(rows, alone=False, hurried=False)
        known = drafting.costs[False].known(2, 1)
        assert known is None or known == 0.5
        now += 0.5 if rows else 9.0
    assert known == 0.5


def test_a_step_whose_drafts_are_all_dropped_is_not_timed() -> None:
    now = 0.0
    drafting = Drafting(SpeculationConfig(), [KVCache()], clock=lambda: now)
    for _ in range(9):
        drafting.begin(1, alone=True, hurried=False)
        drafting.waited(0.9)
        drafting.checks_nothing()
        now += 1.0
    assert drafting.costs[True].known(1, 1) is None


def test_a_check_that_the_next_step_reads_is_timed_as_a_whole() -> None:
    now = 0.0
    drafting = Drafting(SpeculationConfig(), [KVCache()], clock=lambda: now)
    steps: list[tuple[float, int, Step]] = [(0.1, 6, "begins"), (2.0, 6, "follows"), (2.0, 6, "follows")]
    for took, width, step in [*steps, (2.0, 3, "follows"), (1.0, 3, "follows"), (0.9, 3, "reads")]:
        drafting.begin(1, alone=True, hurried=False)
        if step == "reads":
            drafting.only_reads()
        else:
            drafting.checks(width, step)
        now += took
    drafting.begin(1, alone=True, hurried=False)
    times = {width: list(of.each) for width, of in drafting.costs[True]._times[1].items()}
    assert times == {6: pytest.approx([2.0, 2.0]), 3: pytest.approx([1.0])}


def test_of_a_long_prediction_no_more_is_taken_in_than_is_read() -> None:
    drafting = Drafting(SpeculationConfig(adapts_to_time=False), [KVCache()])
    rows = [
        Row(
            RowRequest(SequenceSpec(str(at), "m", (1, 2), SamplingParams(9, at), prediction_ids=(7,) * 3 * FARTHEST)),
            frozenset(),
            None,
        )
        for at in range(2)
    ]
    for step in (1, 2):
        drafting.tries(rows, known=True)
        assert len(drafting._rows) == step, "one in a step"
    text = drafting._rows[rows[0]].prediction
    assert text is not None and len(text.ids) <= FARTHEST + ANCHOR


def test_rows_that_end_apart_cost_a_layer_few_operations_more() -> None:
    """Where the host's time for an operation counts, as on CUDA: finding places and counting are done once a step."""
    assert more_operations(layers=3) - more_operations(layers=2) <= 4


def more_operations(layers: int) -> int:
    """That a step of two rows takes which end apart, over one of rows that end together."""
    sizes = {"hidden_size": 16, "num_hidden_layers": layers, "intermediate_size": 16, "num_attention_heads": 2}
    model = llama.Model(llama.ModelArgs("llama", rms_norm_eps=1e-6, vocab_size=32, **sizes))
    counts = []
    for slack in ([0, 0], [0, 1]):
        caches = ragged([BatchKVCache([0, 0]) for _ in range(layers)])
        mx.eval(model(mx.zeros((2, 8), mx.int32), cache=caches))
        take_back(caches, slack, [0, 0])
        graph = io.StringIO()
        mx.export_to_dot(graph, model(mx.zeros((2, 3), mx.int32), cache=caches))
        counts.append(graph.getvalue().count("shape=rectangle"))
    return counts[1] - counts[0]


@pytest.mark.parametrize(
    ("rows", "on_cpu", "lends"), [(8, True, True), (9, True, False), (32, True, False), (32, False, True)]
)
def test_on_a_cpu_many_rows_try_nothing_at_first(rows: int, *, on_cpu: bool, lends: bool) -> None:
    drafting = Drafting(SpeculationConfig(), [KVCache()], on_cpu=on_cpu)
    drafting.begin(rows, alone=True, hurried=False)
    assert drafting.account(rows, has_texts=False).is_spent is not lends
