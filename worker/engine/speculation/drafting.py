"""Which rows get a draft in a step, what it says, and how long it is.

Texts to draft from, for each row: what it has read and written itself, what its client predicts, and what others have
written behind its prompt (memory.py); the one in which more of the row's end occurs. A row keeps its place in each of
them where single ids differ (alignment.py). Where none says anything a draft model does, if there is one
(model_drafts.py). Drafts are tried as long as they are accepted, and as long as a step with them brings more tokens in
its time than one without (payoff.py).

What a step costs here is bounded: all rows together look through `LOOKED_THROUGH` ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from mlx_model import device
from mlx_model.config import SpeculationConfig
from mlx_model.kv.kinds import are_cut, may_be_taken_back
from worker.engine.batch.row import Row
from worker.engine.messages import SpeculationStats
from worker.engine.speculation.draft_batch import DraftBatch
from worker.engine.speculation.draft_times import best_step
from worker.engine.speculation.memory import Completions, Key, Memory
from worker.engine.speculation.model_drafts import ModelDrafts
from worker.engine.speculation.part import are_dense
from worker.engine.speculation.payoff import (
    SHARED_RECENT,
    TRUST,
    UNLIKELY,
    Account,
    Accounts,
    StepTimes,
    Try,
    best_length,
)
from worker.engine.speculation.silence import SELDOM, Silence
from worker.engine.speculation.source import Source, Texts, draft, new_sources, try_of, up_to_stop

LOOKED_THROUGH = 1 << 18  # ids in one step
WORTH_KEEPING = 2  # tokens

# A step that checks drafts is read at once, or by the one that follows it, or by one that does nothing else.
Step = Literal["plain", "checks", "begins", "follows", "reads"]


class Drafting:
    """Of one engine."""

    def __init__(
        self,
        config: SpeculationConfig | None,
        kv: Sequence[Any],
        model: DraftBatch | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        on_cpu: bool | None = None,
        context: int = 1 << 62,
    ) -> None:
        """Of rows that have such caches; `model`: rows that a draft model reads along with; `on_cpu`: None asks MLX;
        `context`: ids that the model reads of a row, at most."""
        self._config = config or SpeculationConfig()
        self._context = context
        self.is_on = config is not None and may_be_taken_back(kv)
        self._keeps = self.is_on and self._config.memory_bytes > 0
        self._clock = clock
        self._rows: dict[Row, Source] = {}
        self._step_times = {alone: StepTimes() for alone in (True, False)}  # the latter amid prompts
        self._step_times[True].beside, self._step_times[False].beside = self._step_times[False], self._step_times[True]
        self._began = self._waited = self._looked_s = 0.0
        self._size = self._told = 0  # rows of the step that runs, and tokens since it began
        self._alone = self._hurried = False
        self._by_model = False  # the step that runs has waited for its inputs since the draft model might draft
        self._model_reads = False  # the draft model has read prompts in the step that runs
        self._widths = (0, 0)  # of the step that runs and of the one before; 0: not to be timed
        self._memory = Memory(self._config.memory_bytes, tuple({self._config.ngram_min, self._config.ngram_max}))
        self._texts = Texts(self._memory, keeps=self._keeps)
        self._has_texts, self._size_then = False, 0  # most rows of a batch of that size, when it was looked at
        self._step = self._began_in = 0  # the one that runs, and the latest one that was accounted for
        self._asks_at = 0  # the next step in which rows are asked, if nothing changes; 0: maybe this one
        self._accounts = Accounts(on_cpu=device.on_cpu() if on_cpu is None else on_cpu)
        # What only the device knows may be taken back from KV that can be cut anywhere.
        self.overlaps = self.is_on and self._config.overlaps and model is None and are_cut(kv)
        self._tried_on = Account()  # the latest drafts; others may be most when their check is read
        self._foreseen: dict[Row, tuple[int, int, list[int]]] = {}  # of so many tokens, and up to so many to come: ids
        self._predicted: set[Row] = set()  # whose drafts in the latest step that checks some are of their predictions
        self._step_is: Step = "plain"  # the one that runs
        self._half = 0.0, 0.0  # seconds and tokens of a step that began what another one reads
        self._all_batch = False  # rows of the latest step in which some were looked at
        self._rested = 0  # steps that nothing has been looked at
        self._catches_up = False  # in the step that runs
        self._silence = Silence()
        self._model = None if model is None or not self.is_on else ModelDrafts(model, self._config, clock)
        self._stats = SpeculationStats(self.is_on)

    def begin(self, rows: int, *, alone: bool, hurried: bool) -> None:
        """A step begins, of so many rows; `alone`: no prompt is fed beside it; `hurried`: somebody waits for one."""
        self._step += 1
        if self._step < self._asks_at and alone and rows == self._size:
            return
        steps, self._began_in, self._asks_at = self._step - self._began_in, self._step, 0
        now, (width, before), is_alone = self._clock(), self._widths, alone and self._alone
        took = now - self._began
        may_have_idled = steps > 1 and not is_alone  # nothing may have run for long before the rows of this step came
        # What is told while the next step runs takes what shows between two such steps. Amid prompts rows come and go
        # all the time. What was not looked at for long is caught up with in one step.
        shows = self._step_is == "checks" or (self._step_is in ("plain", "follows") and width == before > 0)
        may_be_timed = shows and not (self._model_reads or self._catches_up or may_have_idled)
        self._model_reads = False
        if may_be_timed and self._size and (rows == self._size or not is_alone):
            self._step_times[is_alone].took(self._size, width, (took - self._waited) / steps, steps)
        if self._size and self._config.adapts_to_time:
            usual = 0.0 if may_have_idled else (took - self._looked_s) / steps
            self._settle(usual, self._told / self._size / steps, steps)
        self._began, self._waited, self._size, self._alone, self._hurried = now, 0.0, rows, alone, hurried
        self._widths, self._told, self._looked_s = (1, width), 0, 0.0
        self._rested, self._catches_up, self._step_is = self._rested + steps, False, "plain"

    def told(self, tokens: int) -> None:
        """So many since the step began."""
        self._told += tokens

    def _settle(self, took: float, tokens: float, steps: int) -> None:
        """The account of the step before, or of so many on average; `took`: 0 where that is not known.

        Prompts of batches and jobs come as rows end, so sooner with drafts: more of them come in a step, and fewer
        steps have none. So what steps take on average counts there, and else what such steps take.
        """
        width, before = self._widths
        if self._step_is == "begins":
            self._half = took, tokens
            return
        if self._step_is == "reads":
            took, tokens = took + self._half[0], tokens + self._half[1]
        if width > 1:
            plain = (self._tried_on.plain_s if self._all_batch else 0.0) or self._times.usual(self._size, 1) or took
            if self._tried_on.checked(took, tokens, plain):
                self._tried_on.doubt(self._times.forget(self._size))
        elif before > 1:
            self._tried_on.back(took, tokens)
        elif not width:
            if not self._by_model:  # which rests for that
                self._account.waited(took, tokens)
        elif not took:
            self._account.earned(steps)
        else:
            self._account.plain(took, tokens, steps)
            if self._account.doubted and (known := self._times.known(self._size, 1)) is not None:
                self._account.timed(known)

    @property
    def _account(self) -> Account:
        return self._accounts.of(self._size, has_texts=self._has_texts)

    @property
    def owes(self) -> bool:
        """Whether drafts have cost more than they brought, in batches of this size; False where steps are not timed."""
        return self._config.adapts_to_time and self._account.owes

    @property
    def _times(self) -> StepTimes:
        """Of steps like the one that runs."""
        return self._step_times[self._alone]

    def waited(self, seconds: float) -> None:
        """For the step before, within this one."""
        self._waited = seconds

    def tries(self, rows: Sequence[Row], *, known: bool) -> bool:
        """Whether some row may get a draft; `known`: by what it will be fed. Else nothing is computed until that is, so
        drafts must seem to pay by what has been told."""
        most, times = self._config.most_rows, self._config.adapts_to_time
        if self._asks_at or not rows or (most and len(rows) > most):
            return False
        if new := not all(map(self._rows.__contains__, rows)):
            self._silence.ends()
        if new or len(rows) != self._size_then:
            self._has_texts, self._size_then = self._texts.of_most(rows), len(rows)
        asks_at = self._silence.asks_at(self._step, self._times if times else None, len(rows))
        asks_at = max(asks_at, self._step + self._account.rests if times else 0)
        rests = asks_at > self._step
        if rests and self._model is None:
            is_steady = self._alone and self._widths == (1, 1) and self._texts.have_seen(rows)
            if is_steady and not self._account.doubted:
                self._asks_at = asks_at
            return False
        if times and self._times.known(len(rows), 1) is None:
            return False
        began = self._clock()
        self._all_batch = all(row.spec.sequence_class == "batch" for row in rows)
        self._rested, self._catches_up = 0, self._rested > SELDOM
        if new:
            self._rows |= new_sources([row for row in rows if row not in self._rows], self._config, self._texts)
        sources = [(row, source) for row in rows if (source := self._source(row)) is not None]
        self._memory.begin()
        for _, source in sources:
            source.rests = self._config.adapts_to_rows and source.chance.pauses(self._step)
            source.joined = None if source.key is None or source.rests else self._memory.joined(source.key)
            if source.joined is not None or source.prediction is not None:
                source.chance.hope()
        self._by_model = self._model_may_draft(rows)
        if self._by_model or rests:
            return self._by_model
        if known:
            may = not all(source.rests for _, source in sources)
        else:
            drafts = self._suggested(rows)
            may = any(drafts) and (not times or self._best(rows, drafts, {})[0] > 0)
            self._silence.asked(self._clock() - began, drafts, pays=may)
        if not may:
            self._looked_s = self._clock() - began
            self._account.looked(self._looked_s)
        return may

    def _model_may_draft(self, rows: Sequence[Row]) -> bool:
        """Let the draft model read along, and begin its step."""
        if self._model is None:
            return False
        if self._alone:
            self._model_reads = self._model.read_along([row for row in rows if row in self._rows], self._times)
        self._model.begin(self._step)
        return bool(self._model.lengths(rows))

    def drafts(self, rows: Sequence[Row], inputs: Sequence[int]) -> list[list[int]]:
        """A draft for each row, behind its next input; [] for none."""
        for row, token in zip(rows, inputs, strict=True):
            if (source := self._source(row)) is not None and row.position > len(row.tokens):
                source.add([token])
        drafts = self._suggested(rows)
        silent = [row for row, draft in zip(rows, drafts, strict=True) if not draft and row in self._rows]
        lengths = self._model.lengths(silent) if self._model is not None else {}
        if (room := self._room(rows)) < self._config.tokens:
            drafts = [draft[:room] for draft in drafts]
            lengths = {row: min(length, room) for row, length in lengths.items() if room}
        is_judged = bool(lengths)
        if (any(drafts) or lengths) and self._config.adapts_to_time:
            longest, by_model = self._best(rows, drafts, lengths)
            drafts = [draft[:longest] for draft in drafts]
            lengths = {row: min(length, longest) for row, length in lengths.items() if by_model}
        if lengths:
            drafts = self._filled(rows, inputs, drafts, lengths)
        if not any(drafts):
            if self._model is not None and self._by_model and not is_judged:
                self._model.judge(pays=False)  # it had something to say of rows alone that have drafts by their texts
            self.checks_nothing()
        return drafts

    def ahead(self, rows: Sequence[Row], most: Sequence[int]) -> tuple[list[list[int]], int]:
        """What each row may go on with, where a step that has not been read brings up to `most` ids of each.

        And how long the next drafts should be, which lie anywhere behind the first of these ids; 0: none pays.
        """
        room = self._room(rows) - max(most)
        if room <= 0:
            return [], 0
        foreseen, self._foreseen = self._foreseen, {}
        guesses: list[list[int]] = []
        for row, behind in zip(rows, most, strict=True):
            *place, guess = foreseen.get(row, (-1, -1, []))
            is_so = place == [len(row.tokens), behind]
            guesses.append(guess if is_so else self._draft(row, self._source(row), len(rows), behind))
        # What is left of them behind a draft that holds to its end; of one that does not there is more.
        drafts = [ids[behind : behind + room] for ids, behind in zip(guesses, most, strict=True)]
        longest = max(map(len, drafts))
        if longest and self._config.adapts_to_time:
            longest, _ = self._best(rows, drafts, {})
        return guesses, longest if are_dense(drafts, longest) else 0

    def foresee(self, rows: Sequence[Row], behind: int) -> None:
        """Look for what `ahead` asks for in the next step; which rows pause, and what others wrote, is this step's."""
        for row in rows:
            if row in self._rows and not row.is_over:
                guess = self._draft(row, self._source(row), len(rows), behind)
                self._foreseen[row] = len(row.tokens), behind, guess

    def _room(self, rows: Sequence[Row]) -> int:
        """Ids that may be fed behind the next input of each: a step is as wide for all, and some models know no more
        positions than their context has."""
        return self._context - max(len(row.prompt) + row.position for row in rows)

    def _suggested(self, rows: Sequence[Row]) -> list[list[int]]:
        """For each row what its texts say. Where some say anything, rows that pause draft along: the step is as wide
        without them, and they would wait for it in vain. So they do if it is asked again in the same step."""
        drafts = [self._draft(row, self._source(row), len(rows)) for row in rows]
        for at, row in enumerate(rows if any(drafts) else ()):
            source = self._rows.get(row)
            if source is not None and source.rests and source.chance.known >= UNLIKELY:
                source.rests = False
                source.joined = None if source.key is None else self._memory.joined(source.key)
                drafts[at] = self._draft(row, source, len(rows))
        return drafts

    def checks_nothing(self) -> None:
        """The step that runs, though it has waited for its inputs: it tells nothing of what others take."""
        self._widths = (0, self._widths[1])

    def _best(self, rows: Sequence[Row], drafts: Sequence[list[int]], lengths: Mapping[Row, int]) -> tuple[int, bool]:
        """How long drafts should be at most, and whether those of the draft model pay; (0, False): none pays."""
        by_text = [try_of(row, self._rows.get(row), draft) for row, draft in zip(rows, drafts, strict=True)]
        if self._model is None or not lengths:
            usual = self._account.plain_s * (1.0 if self._account.owes else TRUST) if self._all_batch else 0.0
            return best_length(self._times, by_text, alone=not self._hurried, usual=usual), False
        by_model = [
            Try(self._model.chance(row), lengths[row], each.pace) if row in lengths else each
            for row, each in zip(rows, by_text, strict=True)
        ]
        longest, pays = best_step(self._times, by_text, by_model, self._model.seconds, alone=not self._hurried)
        self._model.judge(pays=pays)
        return longest, pays

    def _filled(
        self, rows: Sequence[Row], inputs: Sequence[int], drafts: list[list[int]], lengths: Mapping[Row, int]
    ) -> list[list[int]]:
        """The drafts, and the draft model's for rows that have none."""
        assert self._model is not None, "a draft model"
        theirs, seconds = self._model.drafts(dict(zip(rows, inputs, strict=True)), lengths)
        self._waited += seconds  # it is counted by itself, not with the step that checks
        for row in theirs:
            self._rows[row].by_model, self._rows[row].is_predicted = True, False
        return [draft or up_to_stop(row, theirs.get(row, [])) for row, draft in zip(rows, drafts, strict=True)]

    @property
    def stats(self) -> SpeculationStats:
        """Since start."""
        return self._stats if self._model is None else replace(self._stats, draft_model=self._model.name)

    def checks(self, width: int, step: Step = "checks") -> None:
        """The step that runs checks drafts."""
        self._widths, self._step_is, self._tried_on = (width, self._widths[1]), step, self._account
        self._predicted = {row for row, source in self._rows.items() if source.is_predicted}

    def only_reads(self) -> None:
        """The step that runs only reads the one before."""
        self._widths, self._step_is = (self._widths[1], self._widths[1]), "reads"

    def checked(self, width: int, results: Iterable[tuple[Row, int, int]]) -> None:
        """The latest step that `checks` has been read: of each row, how many tokens were drafted and accepted."""
        drafts: list[tuple[int, int]] = []
        for row, tried, held in results:
            if row in self._rows:
                self._rows[row].chance.moved(held + 1)
            if tried:
                self._learn(row, tried, held)
                drafts.append((tried, held))
                if row in self._predicted:
                    row.predicted = row.predicted[0] + held, row.predicted[1] + tried - held
        self._stats = self._stats.plus(width, drafts)

    def _learn(self, row: Row, tried: int, held: int) -> None:
        """Of one draft."""
        if self._model is None or not self._rows[row].by_model:
            self._rows[row].chance.learn(tried, held)
            self._texts.chance(row).learn(tried, held, SHARED_RECENT)
            return
        self._model.learn(row, tried, held)
        was = self._stats
        self._stats = replace(was, model_drafted=was.model_drafted + tried, model_accepted=was.model_accepted + held)

    def remove(self, rows: Sequence[Row]) -> None:
        """They have left, or compute their context again; what was written to its end is kept."""
        if self._model is not None:
            self._model.remove(rows)
        written: set[Key | None] = set()
        for row in rows:
            source = self._rows.pop(row, None)
            self._texts.remove(row)
            self._foreseen.pop(row, None)
            if self._keeps and row.spec.cache and row.is_over and len(row.tokens) >= WORTH_KEEPING:
                self._memory.add_later(row.spec, row.tokens)
                written |= {source.key} if source is not None else set()
        self._hear(written)

    def remember(self, completions: Sequence[Completions]) -> None:
        """What other workers' sequences have written."""
        for each in completions:
            self._memory.add(each)
        self._hear({each.key for each in completions})

    def _hear(self, keys: set[Key | None]) -> None:
        """Something has been written behind these prompts: where rows have them, they are asked in the next step."""
        if any(source.key in keys for source in self._rows.values() if source.key is not None):
            self._silence.ends()
            self._asks_at = min(self._asks_at, self._step + 1)

    def _source(self, row: Row) -> Source | None:
        """What is known of it, what has been told of it included; None: it has not been looked at yet."""
        source = self._rows.get(row)
        if source is not None and source.told < len(row.tokens):
            source.add(row.tokens[source.told :])
        return source

    def _draft(self, row: Row, source: Source | None, rows: int, behind: int = 0) -> list[int]:
        by_model = 0.0 if self._model is None else self._model.chance(row)
        return [] if source is None else draft(row, source, self._config, by_model, LOOKED_THROUGH // rows, behind)
