"""Which rows get a draft in a step, what it says, and how long it is.

Texts to draft from, for each row: what it has read and written itself, what its client predicts, and what others have
written behind its prompt (memory.py); the one in which more of the row's end occurs. Drafts are tried as long as they
are accepted, and as long as a step with them brings more tokens in its time than one without (payoff.py).

What a step costs here is bounded: all rows together look through `LOOKED_THROUGH` ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from worker.engine.batch.row import Row
from worker.engine.kv.kinds import may_be_taken_back
from worker.engine.messages import SpeculationConfig, SpeculationStats
from worker.engine.speculation.lookup import BEGINNING, NOTHING, Guess, History, Text, draft_from, own_draft
from worker.engine.speculation.memory import ANCHOR, Completions, Key, Memory, key_of, mark_of, text_behind
from worker.engine.speculation.payoff import SHARED_RECENT, UNLIKELY, Chance, StepTimes, best_length

LOOKED_THROUGH = 1 << 18  # ids in one step
FARTHEST = 1 << 14  # ids that one row looks back
DEEPEST = 16  # ids of a row's end that are looked for in other texts: they tell which of several goes on like it
WORTH_KEEPING = 2  # tokens
NEW_AT_ONCE = 1 << 13  # ids of new rows in one step, one row at least: a long text takes milliseconds to be taken in
LONGEST_REST = 32  # steps, of a batch in which drafts do not pay


@dataclass
class _Source:
    """What is known of one row."""

    history: History
    told: int  # of its tokens, those in `history`
    chance: Chance
    prediction: Text | None  # of its client
    key: Key | None  # of what others have written behind its prompt; None: that is not kept
    rests: bool = False  # in this step
    is_predicted: bool = False  # its draft is from there
    prompt: int = 0  # ids of it in `history`
    likely: float = 0.0  # chance of a token of its draft, on average

    @property
    def written(self) -> int:
        """Ids behind the prompt."""
        return len(self.history) - self.prompt


class Drafting:
    """Of one engine."""

    def __init__(
        self, config: SpeculationConfig | None, kv: Sequence[Any], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Of rows that have such caches."""
        self._config = config or SpeculationConfig()
        self.is_on = config is not None and may_be_taken_back(kv)
        self._clock = clock
        self._rows: dict[Row, _Source] = {}
        self._chance = Chance()  # of all rows lately: what a new row begins with
        self._step_times = {alone: StepTimes() for alone in (True, False)}  # the latter amid prompts
        self._began = self._waited = 0.0
        self._size = 0
        self._alone = False
        self._widths = (0, 0)  # of the step that runs and of the one before; 0: not to be timed
        self._lengths = tuple({self._config.ngram_min, self._config.ngram_max})
        self._memory = Memory(self._config.memory_bytes, self._lengths)
        self._rest = self._losses = 0  # steps without drafts, since they did not pay lately
        self.stats = SpeculationStats(self.is_on)

    def begin(self, rows: int, *, alone: bool) -> None:
        """A step begins, of so many rows; `alone`: no prompt is fed beside it."""
        now, (width, before), is_alone = self._clock(), self._widths, alone and self._alone
        # A step without drafts is told while the next one runs: what it takes shows between two of them. Amid prompts
        # rows come and go all the time.
        if (width > 1 or width == before == 1) and (rows == self._size or not is_alone):
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
        self._rest = max(0, self._rest - 1)
        if not rows or self._rest or (most and len(rows) > most):
            return False
        if times and self._times.known(len(rows), 1) is None:
            return False
        self._take_in([row for row in rows if row not in self._rows])
        sources = [(row, source) for row in rows if (source := self._source(row)) is not None]
        for _, source in sources:
            source.rests = self._config.adapts_to_rows and source.chance.pauses()
        if known:
            return not all(source.rests for _, source in sources)
        return any(self._draft(row, source, len(rows)) for row, source in sources)

    def drafts(self, rows: Sequence[Row], inputs: Sequence[int]) -> list[list[int]]:
        """A draft for each row, behind its next input; [] for none."""
        drafts: list[list[int]] = []
        for row, token in zip(rows, inputs, strict=True):
            source = self._source(row)
            if source is None:
                drafts.append([])
                continue
            if row.position > len(row.tokens):
                source.history.add([token])
                source.told += 1
            drafts.append(self._draft(row, source, len(rows)))
        chosen = [(self._rows[row].likely, len(draft)) for row, draft in zip(rows, drafts, strict=True) if draft]
        if chosen and self._config.adapts_to_time:
            longest = best_length(self._times, len(rows), chosen)
            self._losses = 0 if longest else self._losses + 1
            self._rest = 0 if longest else min(LONGEST_REST, 1 << self._losses)
            drafts = [draft[:longest] for draft in drafts]
        if not any(drafts):
            self._widths = (0, self._widths[1])  # what was waited for belongs to the step before
        return drafts

    def checked(self, width: int, results: Iterable[tuple[Row, int, int]]) -> None:
        """A step of this width has checked drafts: of each row, how many tokens were drafted and accepted."""
        self._widths = (width, self._widths[1])
        drafts = drafted = accepted = 0
        held_at = [*self.stats.accepted_at, *([0] * (width - 1 - len(self.stats.accepted_at)))]
        for row, tried, held in results:
            if tried:
                self._rows[row].chance.learn(tried, held)
                self._chance.learn(tried, held, SHARED_RECENT)
                drafts, drafted, accepted = drafts + 1, drafted + tried, accepted + held
                for at in range(held):
                    held_at[at] += 1
                if self._rows[row].is_predicted:
                    row.predicted = row.predicted[0] + held, row.predicted[1] + tried - held
        was = self.stats
        self.stats = replace(
            was,
            steps=was.steps + 1,
            drafts=was.drafts + drafts,
            drafted=was.drafted + drafted,
            accepted=was.accepted + accepted,
            accepted_at=tuple(held_at),
        )

    def remove(self, rows: Iterable[Row]) -> None:
        """They have left, or compute their context again; what was written to its end is kept."""
        for row in rows:
            source = self._rows.pop(row, None)
            if source is not None and source.key is not None and row.is_over and len(row.tokens) >= WORTH_KEEPING:
                text = mark_of(row.spec.id), np.array(row.tokens, np.int32)
                self._memory.add(Completions(source.key, row.spec.prompt_ids, [text]))

    def remember(self, completions: Iterable[Completions]) -> None:
        """What other workers' sequences have written."""
        for each in completions:
            self._memory.add(each)

    def _source(self, row: Row) -> _Source | None:
        """What is known of it, what has been told of it included; None: it has not been looked at yet."""
        source = self._rows.get(row)
        if source is not None and source.told < len(row.tokens):
            source.history.add(row.tokens[source.told :])
            source.told = len(row.tokens)
        return source

    def _take_in(self, rows: Sequence[Row]) -> None:
        """As many new rows as this step has time for."""
        left = NEW_AT_ONCE
        for row in rows:
            if left <= 0:
                break
            self._rows[row] = self._new(row)
            left -= len(row.spec.prompt_ids)

    def _new(self, row: Row) -> _Source:
        spec, config = row.spec, self._config
        prompt = spec.prompt_ids[-FARTHEST if config.prompt_lookup else -ANCHOR :]
        return _Source(
            History([*prompt, *row.tokens], self._lengths),
            len(row.tokens),
            Chance(self._chance.value),
            Text(text_behind(spec.prompt_ids, spec.prediction_ids), self._lengths) if spec.prediction_ids else None,
            key_of(spec) if config.memory_bytes else None,
            prompt=len(prompt),
        )

    def _draft(self, row: Row, source: _Source, rows: int) -> list[int]:
        """What the row may go on with; [] while nothing suggests itself."""
        config, room = self._config, row.sampling.max_tokens - row.position
        if source.rests or room <= 1:
            return []  # what is drawn behind the draft comes with it
        is_doubtful = config.adapts_to_rows and source.chance.value < config.threshold
        least = config.ngram_max if is_doubtful else config.ngram_min
        most = source.chance.length(config.tokens) if config.adapts_to_rows else config.tokens
        end, far, most = source.history.end, min(FARTHEST, LOOKED_THROUGH // rows), min(most, room - 1)
        text, longest = source.history.latest(far), min(config.tokens, room - 1)
        source.is_predicted = False
        known = self._memory.known(source.key) if source.key is not None else None
        if known is not None and source.prediction is None and source.written < BEGINNING:
            written = source.history.latest(source.written).tolist()
            if (guess := known.beginnings.draft(written, longest)).ids:
                return self._worth(row, source, guess)
        guess = NOTHING
        if source.history.runs[least].may_have(end):
            guess = own_draft(text, most, least, config.ngram_max)
        kept = None if known is None else known.text
        for other in (kept, source.prediction):
            if other is not None and other.runs[least].may_have(end):
                ids = other.ids[-far:] if other is kept else other.ids[:far]
                theirs = draft_from(ids, text, longest if other is kept else most, max(least, guess.matched), DEEPEST)
                if theirs.ids:
                    guess, source.is_predicted = theirs, other is source.prediction
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
    return next((draft[:at] for at, id_ in enumerate(draft) if id_ in row.stop_ids), draft)
