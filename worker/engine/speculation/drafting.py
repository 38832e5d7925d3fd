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
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from worker.engine.batch.row import Row
from worker.engine.kv.kinds import may_be_taken_back
from worker.engine.messages import SpeculationConfig, SpeculationStats
from worker.engine.speculation.alignment import WINDOW, Course, End
from worker.engine.speculation.draft_batch import DraftBatch
from worker.engine.speculation.draft_times import best_step
from worker.engine.speculation.lookup import BEGINNING, NOTHING, Guess, History, Text
from worker.engine.speculation.memory import (
    ANCHOR,
    FARTHEST,
    Completions,
    Joined,
    Key,
    Memory,
    key_of,
    mark_of,
    text_behind,
)
from worker.engine.speculation.model_drafts import ModelDrafts
from worker.engine.speculation.payoff import SHARED_RECENT, UNLIKELY, Chance, StepTimes, Try, best_length

LOOKED_THROUGH = 1 << 18  # ids in one step
WORTH_KEEPING = 2  # tokens
NEW_AT_ONCE = 1 << 13  # ids of new rows in one step, one row at least: a long text takes milliseconds to be taken in
LONGEST_REST = 5  # times that the rest of a batch in which drafts do not pay doubles: 32 steps
SILENT = 16  # steps in which nothing suggests itself for any row: after that ...
SELDOM = 4  # ... one step in so many asks again, for to ask takes time itself


@dataclass
class _Source:
    """What is known of one row."""

    history: History
    told: int  # of its tokens, those in `history`
    chance: Chance
    prediction: Text | None  # of its client
    key: Key | None  # of what others have written behind its prompt; None: that is not kept
    joined: Joined | None = None  # that, as far as it is ready in this step
    rests: bool = False  # in this step
    is_predicted: bool = False  # its draft is from there
    by_model: bool = False  # its draft is of the draft model
    prompt: int = 0  # ids of it in `history`
    likely: float = 0.0  # chance of a token of its draft, on average
    own: Course = field(default_factory=lambda: Course(is_own=True))
    predicted: Course = field(default_factory=Course)
    kept: Course = field(default_factory=Course)  # with what others have written

    def add(self, ids: Sequence[int]) -> None:
        """The row has gone on with these."""
        self.history.add(ids)
        for each in (self.own, self.predicted, self.kept):
            each.follow(ids, self.history.ids)
        self.told += len(ids)

    @property
    def written(self) -> int:
        """Ids behind the prompt."""
        return len(self.history) - self.prompt


class Drafting:
    """Of one engine."""

    def __init__(
        self,
        config: SpeculationConfig | None,
        kv: Sequence[Any],
        model: DraftBatch | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Of rows that have such caches; `model`: rows that a draft model reads along with."""
        self._config = config or SpeculationConfig()
        self.is_on = config is not None and may_be_taken_back(kv)
        self._keeps = self.is_on and self._config.memory_bytes > 0
        self._clock = clock
        self._rows: dict[Row, _Source] = {}
        self._chance = Chance()  # of all rows lately: what a new row begins with
        self._step_times = {alone: StepTimes() for alone in (True, False)}  # the latter amid prompts
        self._began = self._waited = 0.0
        self._size = 0
        self._alone = False
        self._reads = False  # the draft model has read prompts in the step that runs
        self._widths = (0, 0)  # of the step that runs and of the one before; 0: not to be timed
        self._lengths = tuple({self._config.ngram_min, self._config.ngram_max})
        self._memory = Memory(self._config.memory_bytes, self._lengths)
        self._step = 0
        self._losses = 0  # times in a row that drafts would not have paid
        self._silent = 0  # that nothing suggested itself, without a new row
        self._model = None if model is None or not self.is_on else ModelDrafts(model, self._config, clock)
        self._stats = SpeculationStats(self.is_on)

    def begin(self, rows: int, *, alone: bool) -> None:
        """A step begins, of so many rows; `alone`: no prompt is fed beside it."""
        now, (width, before), is_alone = self._clock(), self._widths, alone and self._alone
        # A step without drafts is told while the next one runs: what it takes shows between two of them. Amid prompts
        # rows come and go all the time.
        may_be_timed, self._reads = not self._reads, False
        if may_be_timed and self._size and (width > 1 or width == before == 1) and (rows == self._size or not is_alone):
            self._step_times[is_alone].took(self._size, width, now - self._began - self._waited)
        self._began, self._waited, self._size, self._alone = now, 0.0, rows, alone
        self._widths = (1, width)

    @property
    def _times(self) -> StepTimes:
        """Of steps like the one that runs."""
        return self._step_times[self._alone]

    def waited(self, seconds: float) -> None:
        """For the step before, within this one."""
        self._waited = seconds

    def tries(self, rows: Sequence[Row], *, known: bool) -> bool:
        """Whether some row may get a draft, by what has been told of it; `known`: by what it will be fed."""
        most, times = self._config.most_rows, self._config.adapts_to_time
        self._step += 1
        new = [row for row in rows if row not in self._rows]
        if new:
            self._silent = 0
        rests = self._step % (1 << min(LONGEST_REST, self._losses)) != 0
        rests |= self._silent > SILENT and self._step % SELDOM != 0
        if not rows or (rests and self._model is None) or (most and len(rows) > most):
            return False
        if times and self._times.known(len(rows), 1) is None:
            return False
        self._take_in(new)
        sources = [(row, source) for row in rows if (source := self._source(row)) is not None]
        self._memory.begin()
        for _, source in sources:
            source.rests = self._config.adapts_to_rows and source.chance.pauses(self._step)
            source.joined = None if source.key is None or source.rests else self._memory.joined(source.key)
            if source.joined is not None or source.prediction is not None:
                source.chance.hope()
        if self._model_may_draft(rows):
            return True
        if rests:
            return False
        if known:
            return not all(source.rests for _, source in sources)
        may = any(self._draft(row, source, len(rows)) for row, source in sources)
        self._silent = 0 if may else self._silent + 1
        return may

    def _model_may_draft(self, rows: Sequence[Row]) -> bool:
        """Let the draft model read along, and begin its step."""
        if self._model is None:
            return False
        if self._alone:
            self._reads = self._model.read_along([row for row in rows if row in self._rows], self._times)
        self._model.begin(self._step)
        return bool(self._model.lengths(rows))

    def drafts(self, rows: Sequence[Row], inputs: Sequence[int], *, together: bool = False) -> list[list[int]]:
        """A draft for each row, behind its next input; [] for none.

        `together`: rows move on by equally much, so either all of them have one, or none does.
        """
        drafts: list[list[int]] = []
        for row, token in zip(rows, inputs, strict=True):
            source = self._source(row)
            if source is None:
                drafts.append([])
                continue
            if row.position > len(row.tokens):
                source.add([token])
            drafts.append(self._draft(row, source, len(rows)))
        if any(drafts):
            self._wake(rows, drafts)
        silent = [row for row, draft in zip(rows, drafts, strict=True) if not draft and row in self._rows]
        lengths = self._model.lengths(silent) if self._model is not None else {}
        if together and not all(draft or row in lengths for row, draft in zip(rows, drafts, strict=True)):
            if self._config.adapts_to_time:
                self._losses += any(drafts)
            drafts, lengths = [[] for _ in rows], {}
        if (any(drafts) or lengths) and self._config.adapts_to_time:
            longest, by_model = self._best(rows, drafts, lengths)
            if any(drafts):
                self._losses = 0 if longest else self._losses + 1
            drafts = [draft[:longest] for draft in drafts]
            lengths = {row: min(length, longest) for row, length in lengths.items() if by_model}
        if lengths:
            drafts = self._filled(rows, inputs, drafts, lengths)
        if not any(drafts):
            self.checks_nothing()
        return drafts

    def _wake(self, rows: Sequence[Row], drafts: list[list[int]]) -> None:
        """Let rows that pause draft along: the step is as wide without them, and they would wait for it in vain."""
        for at, row in enumerate(rows):
            source = self._rows.get(row)
            if source is not None and source.rests and source.chance.known >= UNLIKELY:
                source.rests = False
                source.joined = None if source.key is None else self._memory.joined(source.key)
                drafts[at] = self._draft(row, source, len(rows))

    def checks_nothing(self) -> None:
        """The step that runs, though it has waited for its inputs: what was waited for belongs to the step before."""
        self._widths = (0, self._widths[1])

    def _best(self, rows: Sequence[Row], drafts: Sequence[list[int]], lengths: Mapping[Row, int]) -> tuple[int, bool]:
        """How long drafts should be at most, and whether those of the draft model pay; (0, False): none pays."""
        by_text = self._tries(rows, drafts)
        if self._model is None or not lengths:
            return best_length(self._times, by_text, alone=self._alone), False
        by_model = [
            Try(self._model.chance(row), lengths[row], each.pace) if row in lengths else each
            for row, each in zip(rows, by_text, strict=True)
        ]
        longest, pays = best_step(self._times, by_text, by_model, self._model.seconds, alone=self._alone)
        self._model.judge(pays=pays)
        return longest, pays

    def _tries(self, rows: Sequence[Row], drafts: Sequence[list[int]]) -> list[Try]:
        sources = [self._rows.get(row) for row in rows]
        return [
            Try(0.0, 0, 1.0) if source is None else Try(source.likely, len(draft), source.chance.pace)
            for source, draft in zip(sources, drafts, strict=True)
        ]

    def _filled(
        self, rows: Sequence[Row], inputs: Sequence[int], drafts: list[list[int]], lengths: Mapping[Row, int]
    ) -> list[list[int]]:
        """The drafts, and the draft model's for rows that have none."""
        assert self._model is not None, "a draft model"
        theirs, seconds = self._model.drafts(dict(zip(rows, inputs, strict=True)), lengths)
        self._waited += seconds  # it is counted by itself, not with the step that checks
        for row in theirs:
            self._rows[row].by_model, self._rows[row].is_predicted = True, False
        return [draft or _up_to_stop(row, theirs.get(row, [])) for row, draft in zip(rows, drafts, strict=True)]

    @property
    def stats(self) -> SpeculationStats:
        """Since start."""
        return self._stats if self._model is None else replace(self._stats, draft_model=self._model.name)

    def checked(self, width: int, results: Iterable[tuple[Row, int, int]]) -> None:
        """A step of this width has checked drafts: of each row, how many tokens were drafted and accepted."""
        self._widths = (width, self._widths[1])
        drafts = drafted = accepted = 0
        held_at = [*self._stats.accepted_at, *([0] * (width - 1 - len(self._stats.accepted_at)))]
        for row, tried, held in results:
            if row in self._rows:
                self._rows[row].chance.moved(held + 1)
            if tried:
                self._learn(row, tried, held)
                drafts, drafted, accepted = drafts + 1, drafted + tried, accepted + held
                for at in range(held):
                    held_at[at] += 1
                if self._rows[row].is_predicted:
                    row.predicted = row.predicted[0] + held, row.predicted[1] + tried - held
        was = self._stats
        self._stats = replace(
            was,
            steps=was.steps + 1,
            drafts=was.drafts + drafts,
            drafted=was.drafted + drafted,
            accepted=was.accepted + accepted,
            accepted_at=tuple(held_at),
        )

    def _learn(self, row: Row, tried: int, held: int) -> None:
        """Of one draft."""
        if self._model is None or not self._rows[row].by_model:
            self._rows[row].chance.learn(tried, held)
            self._chance.learn(tried, held, SHARED_RECENT)
            return
        self._model.learn(row, tried, held)
        was = self._stats
        self._stats = replace(was, model_drafted=was.model_drafted + tried, model_accepted=was.model_accepted + held)

    def remove(self, rows: Sequence[Row]) -> None:
        """They have left, or compute their context again; what was written to its end is kept."""
        if self._model is not None:
            self._model.remove(rows)
        left = NEW_AT_ONCE
        for row in rows:
            source = self._rows.pop(row, None)
            if not (self._keeps and row.is_over and len(row.tokens) >= WORTH_KEEPING):
                continue
            key = None if source is None else source.key
            if key is None and left > 0:  # rows of a batch too large for drafts have not been looked at
                key = key_of(row.spec)
                left -= len(row.spec.prompt_ids)
            if key is not None:
                text = mark_of(row.spec.id), np.array(row.tokens, np.int32)
                self._memory.add(Completions(key, row.spec.prompt_ids, [text]))

    def remember(self, completions: Iterable[Completions]) -> None:
        """What other workers' sequences have written."""
        for each in completions:
            self._memory.add(each)

    def _source(self, row: Row) -> _Source | None:
        """What is known of it, what has been told of it included; None: it has not been looked at yet."""
        source = self._rows.get(row)
        if source is not None and source.told < len(row.tokens):
            source.add(row.tokens[source.told :])
        return source

    def _take_in(self, rows: Sequence[Row]) -> None:
        """As many new rows as this step has time for."""
        left = NEW_AT_ONCE
        for row in rows:
            if left <= 0:
                break
            self._rows[row] = self._new(row)
            left -= len(row.spec.prompt_ids) + min(FARTHEST, len(row.spec.prediction_ids))

    def _new(self, row: Row) -> _Source:
        spec, config = row.spec, self._config
        predicted = spec.prediction_ids[:FARTHEST]
        prompt = spec.prompt_ids[-FARTHEST if config.prompt_lookup else -ANCHOR :]
        source = _Source(
            History([*prompt, *row.tokens], self._lengths),
            len(row.tokens),
            Chance(self._chance.value),
            Text(text_behind(spec.prompt_ids, predicted), self._lengths) if predicted else None,
            key_of(spec) if self._keeps else None,
            prompt=len(prompt),
        )
        if source.prediction is not None and not row.tokens:
            text = source.prediction.ids
            source.predicted.begin(text, len(text) - len(predicted))
        return source

    def _draft(self, row: Row, source: _Source, rows: int) -> list[int]:
        """What the row may go on with; [] while nothing suggests itself."""
        config, room = self._config, row.sampling.max_tokens - row.position
        if source.rests or room <= 1:
            return []  # what is drawn behind the draft comes with it
        by_model = 0.0 if self._model is None else self._model.chance(row)
        is_doubtful = config.adapts_to_rows and source.chance.value < max(config.threshold, by_model)
        least = config.ngram_max if is_doubtful else config.ngram_min
        most = source.chance.length(config.tokens) if config.adapts_to_rows else config.tokens
        most, longest = min(most, room - 1), min(config.tokens, room - 1)
        source.is_predicted = source.by_model = False
        joined = source.joined
        if joined is not None and source.prediction is None and source.written < BEGINNING:
            written = source.history.latest(source.written)
            if (guess := joined.beginnings.draft(written, longest)).ids:
                return self._worth(row, source, guess)
        guess, far = NOTHING, min(FARTHEST, LOOKED_THROUGH // rows)
        history = source.history
        end = End(history.latest(WINDOW).tolist(), least)
        if joined is not None:
            guess = source.kept.draft(joined.text, slice(-far, None), end, longest)
        if source.prediction is not None:
            theirs = source.predicted.draft(source.prediction, slice(far), end, most)
            if theirs.ids and theirs.matched >= guess.matched:
                guess, source.is_predicted = theirs, True
        # What the row has written itself counts where more of its end is found there: no more than is looked for.
        if config.own_text and (guess.matched < config.ngram_max or source.own.is_along(least)):
            end = End(end.ids[-config.ngram_max :], least)
            own = source.own.draft(history, slice(-far, None), end, most)
            if own.matched > guess.matched:
                guess, source.is_predicted = own, False
        return self._worth(row, source, guess)

    def _worth(self, row: Row, source: _Source, guess: Guess) -> list[int]:
        """As much of a draft as is likely to be reached."""
        source.likely = source.chance.value
        if guess.votes and self._config.adapts_to_rows:
            agreed, source.likely = guess.agreed(source.chance.value, UNLIKELY)
            return _up_to_stop(row, guess.ids[:agreed])
        return _up_to_stop(row, guess.ids)


def _up_to_stop(row: Row, draft: list[int]) -> list[int]:
    """Without the token that ends the row: what is drawn behind a draft comes with it in any case."""
    if not row.stop_ids or row.stop_ids.isdisjoint(draft):
        return draft
    return next((draft[:at] for at, id_ in enumerate(draft) if id_ in row.stop_ids), draft)
