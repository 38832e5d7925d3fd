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
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mlx_model import device
from mlx_model.config import SpeculationConfig
from mlx_model.kv.kinds import are_cut, may_be_taken_back
from worker.engine.batch.row import Row
from worker.engine.messages import SpeculationStats
from worker.engine.speculation.draft_batch import DraftBatch
from worker.engine.speculation.memory import Completions, Memory, key_of, mark_of
from worker.engine.speculation.model_drafts import ModelDrafts
from worker.engine.speculation.part import are_dense
from worker.engine.speculation.payoff import (
    FEW_ROWS,
    SELDOM,
    SHARED_RECENT,
    TRUST,
    UNLIKELY,
    WAIT,
    Account,
    Costs,
    Silence,
    Try,
    about,
    best_step,
)
from worker.engine.speculation.source import Source, Texts, try_of, up_to_stop

LOOKED_THROUGH = 1 << 18  # ids in one step
WORTH_KEEPING = 2  # tokens

# A step that checks drafts is read at once, or by the one that follows it, or by one that does nothing else.
Step = Literal["plain", "checks", "begins", "follows", "reads"]


@dataclass
class Running:
    """The step that runs, or several without drafts that nothing has looked at."""

    rows: int = 0
    alone: bool = False  # no prompt is fed in parallel
    hurried: bool = False  # a client waits for one
    began: float = 0.0
    before: int = 0  # width of the step before
    width: int = 1  # 0: not to be timed
    kind: Step = "plain"
    tokens: int = 0  # reported since it began
    waited: float = 0.0  # for the step before
    looked: float = 0.0  # for drafts in vain
    by_model: bool = False  # it has waited for its inputs since the draft model might draft
    model_reads: bool = False  # prompts
    catches_up: bool = False  # with what was not looked at for long


class Drafting:
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
        """`kv`: caches of such rows as are drafted for; `model`: rows that a draft model reads along with; `on_cpu`:
        None asks MLX; `context`: ids that the model reads of a row, at most."""
        self._config = config or SpeculationConfig()
        self._context = context
        self.is_on = config is not None and may_be_taken_back(kv)
        self._keeps = self.is_on and self._config.memory_bytes > 0
        self._clock = clock
        # What only the device knows may be taken back from KV that can be cut anywhere.
        self.overlaps = self.is_on and self._config.overlaps and model is None and are_cut(kv)
        self._model = None if model is None or not self.is_on else ModelDrafts(model, self._config, clock)
        self._stats = SpeculationStats(self.is_on)
        # What is known of rows and texts.
        self._rows: dict[Row, Source] = {}
        self._memory = Memory(self._config.memory_bytes, tuple({self._config.ngram_min, self._config.ngram_max}))
        self._texts = Texts(self._memory, self._config, keeps=self._keeps)
        self.has_texts, self._size_then = False, 0  # most rows of a batch of that size, when it was looked at
        self._all_batch = False  # rows of the latest step in which some were looked at
        self._foreseen: dict[Row, tuple[int, int, list[int]]] = {}  # of so many tokens, and up to so many to come: ids
        self._predicted: set[Row] = set()  # whose drafts in the latest step that checks some are of their predictions
        # What drafts cost and bring.
        self.costs = {alone: Costs() for alone in (True, False)}  # the latter amid prompts
        self.costs[True].beside, self.costs[False].beside = self.costs[False], self.costs[True]
        self._on_cpu = device.on_cpu() if on_cpu is None else on_cpu
        self._accounts: dict[tuple[int, bool], Account] = {}
        self._tried_on = Account()  # the latest drafts; others may be most when their check is read
        self._silence = Silence()
        self._now = Running(width=0)
        self._half = 0.0, 0.0  # seconds and tokens of a step that began what another one reads
        self._step = self._began_in = 0  # the one that runs, and the latest one that was accounted for
        self._asks_at = 0  # the next step in which rows are asked, if nothing changes; 0: maybe this one
        self._rested = 0  # steps that nothing has been looked at

    def begin(self, rows: int, *, alone: bool, hurried: bool) -> None:
        """A step begins, of so many rows; `alone`: no prompt is fed in parallel; `hurried`: a client waits for one."""
        self._step += 1
        last = self._now
        if self._step < self._asks_at and alone and rows == last.rows:
            return
        steps, self._began_in, self._asks_at = self._step - self._began_in, self._step, 0
        now, is_alone = self._clock(), alone and last.alone
        took = now - last.began
        may_have_idled = steps > 1 and not is_alone  # nothing may have run for long before the rows of this step came
        # What is reported while the next step runs takes what shows between two such steps. Amid prompts rows come and
        # go all the time. What was not looked at for long is caught up with in one step.
        shows = last.kind == "checks" or (last.kind in ("plain", "follows") and last.width == last.before > 0)
        may_be_timed = shows and not (last.model_reads or last.catches_up or may_have_idled)
        if may_be_timed and last.rows and (rows == last.rows or not is_alone):
            self.costs[is_alone].took(last.rows, last.width, (took - last.waited) / steps, steps)
        if last.rows and self._config.adapts_to_time:
            usual = 0.0 if may_have_idled else (took - last.looked) / steps
            self._settle(usual, last.tokens / last.rows / steps, steps)
        self._now = Running(rows, alone, hurried, now, last.width)
        self._rested += steps

    def told(self, tokens: int) -> None:
        self._now.tokens += tokens

    def _settle(self, took: float, tokens: float, steps: int) -> None:
        """The account of the step before, or of so many on average; `took`: 0 where that is not known.

        Prompts of batches and jobs come as rows end, so sooner with drafts: more of them come in a step, and fewer
        steps have none. So what steps take on average counts there, and else what such steps take.
        """
        last, account = self._now, self._account
        if last.kind == "begins":
            self._half = took, tokens
            return
        if last.kind == "reads":
            took, tokens = took + self._half[0], tokens + self._half[1]
        if last.width > 1:
            plain = (self._tried_on.plain_s if self._all_batch else 0.0) or self._times.usual(last.rows, 1) or took
            if self._tried_on.checked(took, tokens, plain):
                self._tried_on.doubted = self._times.forget(last.rows)
        elif last.before > 1:
            self._tried_on.waited(took, tokens)
        elif not last.width:
            if not last.by_model:  # which rests for that
                account.waited(took, tokens, WAIT)
        else:
            account.plain(took, tokens, steps)
            if account.doubted and took and (known := self._times.known(last.rows, 1)) is not None:
                account.timed(known)

    def account(self, rows: int, *, has_texts: bool) -> Account:
        """The one of batches of about so many rows; `has_texts`: most have one to draft from besides their own."""
        key, other = (about(rows), has_texts), (about(rows), not has_texts)
        if key not in self._accounts:
            lends = key[0] <= FEW_ROWS or not self._on_cpu  # on a CPU many rows take longer for each drafted token
            self._accounts[key] = Account(lends=lends, beside=self._accounts.get(other))
        return self._accounts[key]

    @property
    def _account(self) -> Account:
        return self.account(self._now.rows, has_texts=self.has_texts)

    @property
    def owes(self) -> bool:
        """True if drafts have cost more than they brought, in batches of this size; False where steps are not timed."""
        return self._config.adapts_to_time and self._account.owes

    @property
    def _times(self) -> Costs:
        return self.costs[self._now.alone]

    def waited(self, seconds: float) -> None:
        """For the step before, within this one."""
        self._now.waited = seconds

    def tries(self, rows: Sequence[Row], *, known: bool) -> bool:
        """True if some row may get a draft; `known`: by what it will be fed. Else nothing is computed until that is, so
        drafts must seem to pay by what has been told."""
        most, by_clock, now = self._config.most_rows, self._config.adapts_to_time, self._now
        if self._asks_at or not rows or (most and len(rows) > most):
            return False
        if any(row.sampling.return_routed_experts for row in rows):  # which are noted of one-token forwards
            return False
        if new := [row for row in rows if row not in self._rows]:
            self._silence.steps = 0
        if new or len(rows) != self._size_then:
            self.has_texts, self._size_then = self._texts.of_most(rows), len(rows)
        asks_at = self._silence.asks_at(self._step, self._times.usual(len(rows), 1) if by_clock else None)
        asks_at = max(asks_at, self._step + self._account.rests if by_clock else 0)
        rests = asks_at > self._step
        if rests and self._model is None:
            is_steady = now.alone and now.width == now.before == 1 and self._texts.have_seen(rows)
            if is_steady and not self._account.doubted:
                self._asks_at = asks_at
            return False
        if by_clock and self._times.known(len(rows), 1) is None:
            return False
        began = self._clock()
        self._all_batch = all(row.spec.sequence_class == "batch" for row in rows)
        self._rested, now.catches_up = 0, self._rested > SELDOM
        if new:
            self._rows |= self._texts.sources(new)
        sources = [source for row in rows if (source := self._source(row)) is not None]
        self._memory.begin()
        for source in sources:
            source.rests = self._config.adapts_to_rows and source.chance.pauses(self._step)
            source.joined = None if source.key is None or source.rests else self._memory.joined(source.key)
            if source.joined is not None or source.prediction is not None:
                source.chance.hope()
        now.by_model = self._model_may_draft(rows)
        if now.by_model or rests:
            return now.by_model
        if known:
            may = not all(source.rests for source in sources)
        else:
            drafts = self._suggested(rows)
            may = any(drafts) and (not by_clock or self._best(rows, drafts, {})[0] > 0)
            self._silence.asked(self._clock() - began, drafts, pays=may)
        if not may:
            now.looked = self._clock() - began
            self._account.looked(now.looked)
        return may

    def _model_may_draft(self, rows: Sequence[Row]) -> bool:
        if self._model is None:
            return False
        if self._now.alone:
            self._now.model_reads = self._model.read_along([row for row in rows if row in self._rows], self._times)
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
            if self._model is not None and self._now.by_model and not is_judged:
                self._model.judge(pays=False)  # it had something to say of rows alone that have drafts by their texts
            self.checks_nothing()
        return drafts

    def ahead(self, rows: Sequence[Row], most: Sequence[int]) -> tuple[list[list[int]], int]:
        """Ids that each row may go on with, where a step that has not been read brings up to `most` ids of each.

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
            guesses.append(guess if is_so else self._draft(row, len(rows), behind))
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
                guess = self._draft(row, len(rows), behind)
                self._foreseen[row] = len(row.tokens), behind, guess

    def _room(self, rows: Sequence[Row]) -> int:
        """Ids that may be fed behind the next input of each: a step is as wide for all, and some models know no more
        positions than their context has."""
        return self._context - max(len(row.prompt) + row.position for row in rows)

    def _suggested(self, rows: Sequence[Row]) -> list[list[int]]:
        """For each row what its texts say. Where some say anything, rows that pause draft along: the step is as wide
        without them, and they would wait for it in vain. So they do if it is asked again in the same step."""
        drafts = [self._draft(row, len(rows)) for row in rows]
        for at, row in enumerate(rows if any(drafts) else ()):
            source = self._rows.get(row)
            if source is not None and source.rests and source.chance.known >= UNLIKELY:
                source.rests = False
                source.joined = None if source.key is None else self._memory.joined(source.key)
                drafts[at] = self._draft(row, len(rows))
        return drafts

    def checks_nothing(self) -> None:
        """The step that runs, though it has waited for its inputs: it tells nothing of what others take."""
        self._now.width = 0

    def _best(self, rows: Sequence[Row], drafts: Sequence[list[int]], lengths: Mapping[Row, int]) -> tuple[int, bool]:
        """How long drafts should be at most, and whether those of the draft model pay; (0, False): none pays."""
        by_text = [try_of(row, self._rows.get(row), draft) for row, draft in zip(rows, drafts, strict=True)]
        alone = not self._now.hurried
        if self._model is None or not lengths:
            usual = self._account.plain_s * (1.0 if self._account.owes else TRUST) if self._all_batch else 0.0
            return best_step(self._times, by_text, alone=alone, usual=usual)
        by_model = [
            Try(self._model.chance(row), lengths[row], each.pace) if row in lengths else each
            for row, each in zip(rows, by_text, strict=True)
        ]
        longest, pays = best_step(self._times, by_text, by_model, self._model.forward_s, alone=alone)
        self._model.judge(pays=pays)
        return longest, pays

    def _filled(
        self, rows: Sequence[Row], inputs: Sequence[int], drafts: list[list[int]], lengths: Mapping[Row, int]
    ) -> list[list[int]]:
        """The drafts, and the draft model's for rows that have none."""
        assert self._model is not None, "a draft model"
        theirs, seconds = self._model.drafts(dict(zip(rows, inputs, strict=True)), lengths)
        self._now.waited += seconds  # it is counted by itself, not with the step that checks
        for row in theirs:
            self._rows[row].by_model, self._rows[row].is_predicted = True, False
        return [draft or up_to_stop(row, theirs.get(row, [])) for row, draft in zip(rows, drafts, strict=True)]

    @property
    def stats(self) -> SpeculationStats:
        return self._stats if self._model is None else replace(self._stats, draft_model=self._model.name)

    def checks(self, width: int, step: Step = "checks") -> None:
        self._now.width, self._now.kind, self._tried_on = width, step, self._account
        self._predicted = {row for row, source in self._rows.items() if source.is_predicted}

    def only_reads(self) -> None:
        self._now.width, self._now.kind = self._now.before, "reads"

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
        written: list[Completions] = []
        for row in rows:
            self._rows.pop(row, None)
            key = self._texts.remove(row)
            self._foreseen.pop(row, None)
            if self._keeps and row.spec.cache and row.is_over and len(row.tokens) >= WORTH_KEEPING:
                text = mark_of(row.spec.id), np.array(row.tokens, np.int32)
                written.append(Completions(key or key_of(row.spec), row.spec.prompt_ids, [text]))
        self.remember(written)

    def remember(self, completions: Sequence[Completions]) -> None:
        """Keep what sequences have written, of other workers, too; rows of such prompts are asked in the next step."""
        for each in completions:
            self._memory.add(each)
        keys = {each.key for each in completions}
        if keys and any(source.key in keys for source in self._rows.values()):
            self._silence.steps = 0
            self._asks_at = min(self._asks_at, self._step + 1)

    def _source(self, row: Row) -> Source | None:
        """All that is known of it, what has been told of it included; None: it has not been looked at yet."""
        source = self._rows.get(row)
        if source is not None and source.told < len(row.tokens):
            source.add(row.tokens[source.told :])
        return source

    def _draft(self, row: Row, rows: int, behind: int = 0) -> list[int]:
        if (source := self._source(row)) is None:
            return []
        by_model = 0.0 if self._model is None else self._model.chance(row)
        return source.draft(row, self._config, by_model, LOOKED_THROUGH // rows, behind)
