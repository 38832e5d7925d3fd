"""The texts that one row may go on along, how its drafts have held, and the next draft by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_model.config import SpeculationConfig
from worker.engine.batch.row import Row
from worker.engine.speculation.alignment import WINDOW, Course, End
from worker.engine.speculation.lookup import BEGINNING, NOTHING, Guess, Text
from worker.engine.speculation.memory import ANCHOR, FARTHEST, Joined, Key, Memory, key_of, text_behind
from worker.engine.speculation.payoff import UNLIKELY, Chance, Try

NEW_AT_ONCE = 1 << 13  # ids of new rows in one step, one row at least: a long text takes milliseconds to be taken in


@dataclass
class Source:
    history: Text  # what it has read and written
    told: int  # of its tokens, those in `history`
    chance: Chance
    prediction: Text | None  # of its client
    key: Key | None  # of what others have written behind its prompt; None: that is not kept
    prompt: int  # ids of it in `history`
    joined: Joined | None = None  # what others have written, as far as it is ready in this step
    rests: bool = False  # in this step
    is_predicted: bool = False  # its draft is from there
    by_model: bool = False  # its draft is of the draft model
    likely: float = 0.0  # chance of a token of its draft, on average
    own: Course = field(default_factory=lambda: Course(is_own=True))
    predicted: Course = field(default_factory=Course)
    kept: Course = field(default_factory=Course)  # with what others have written

    def add(self, ids: list[int]) -> None:
        self.history.add(ids)
        for each in (self.own, self.predicted, self.kept):
            each.follow(ids, self.history)
        self.told += len(ids)

    def draft(
        self, row: Row, config: SpeculationConfig, by_model: float, looked_through: int, behind: int
    ) -> list[int]:
        """Ids that the row may go on with; [] while nothing suggests itself.

        `by_model`: the chance of a draft model's drafts; `looked_through`: ids of a text, at most; `behind`: the row
        may have gone on by so many ids that are not known, so as many more are wanted.
        """
        room = row.sampling.max_tokens - row.position
        if self.rests or room <= 1:
            return []  # what is drawn behind the draft comes with it
        self.likely = self.chance.value
        is_doubtful = config.adapts_to_rows and self.likely < max(config.threshold, by_model)
        least = config.ngram_max if is_doubtful else config.ngram_min
        most = self.chance.length(config.tokens) if config.adapts_to_rows else config.tokens
        guess = self._guess(
            config,
            least,
            min(most + behind, room - 1),
            min(config.tokens + behind, room - 1),
            min(FARTHEST, looked_through),
        )
        ids = guess.ids
        if guess.votes and not behind and config.adapts_to_rows:
            agreed, self.likely = guess.agreed(self.likely, UNLIKELY)
            ids = ids[:agreed]
        return up_to_stop(row, ids)

    def _guess(self, config: SpeculationConfig, least: int, most: int, longest: int, far: int) -> Guess:
        """Follow the text in which more of the row's end occurs; what others have written says up to `longest` ids."""
        self.is_predicted = self.by_model = False
        history, joined, guess, has_slipped = self.history, self.joined, NOTHING, False
        written = len(history) - self.prompt
        if joined is not None and self.prediction is None and written < BEGINNING:
            guess = joined.beginnings.draft(history.end(written), longest)
            if guess.ids:
                return guess
        end = End(history.end(WINDOW), least)
        if joined is not None:
            guess = self.kept.draft(joined.text, slice(-far, None), end, longest)
            has_slipped = self.kept.has_slipped
        if self.prediction is not None:
            theirs = self.predicted.draft(self.prediction, slice(far), end, most)
            has_slipped |= self.predicted.has_slipped
            if theirs.ids and theirs.matched >= guess.matched:
                guess, self.is_predicted = theirs, True
        # What the row has written itself counts where more of its end is there: no more than is looked for.
        is_sure = guess.matched >= config.ngram_max or has_slipped
        if config.own_text and (not is_sure or self.own.is_along(least)):
            end = End(end.ids[-config.ngram_max :], least)
            own = self.own.draft(history, slice(-far, None), end, most)
            if own.matched > guess.matched:
                guess, self.is_predicted = own, False
        return guess


class Texts:
    """Rows that had a text to draft from besides their own when they came: how drafts of such rows hold, and if they
    pay, says nothing of the others'."""

    def __init__(self, memory: Memory, config: SpeculationConfig, *, keeps: bool) -> None:
        self._memory, self._config, self._keeps = memory, config, keeps
        self._known: dict[Row, tuple[Key | None, bool]] = {}
        self._chances = {has: Chance() for has in (True, False)}

    def chance(self, row: Row) -> Chance:
        """How drafts of all such rows have held lately: what a new one begins with."""
        return self._chances[self._look_at(row)[1]]

    def of_most(self, rows: Sequence[Row]) -> bool:
        """True if half of them had, or more, as far as this step has time to look at those that are new."""
        left, with_text = NEW_AT_ONCE, 0
        for row in rows:
            if (looked_at := self._known.get(row)) is None:
                if left <= 0:
                    continue
                left -= len(row.spec.prompt_ids)
                looked_at = self._look_at(row)
            with_text += 1 if looked_at[1] else -1
        return with_text >= 0

    def have_seen(self, rows: Sequence[Row]) -> bool:
        return all(row in self._known for row in rows)

    def _look_at(self, row: Row) -> tuple[Key | None, bool]:
        if row not in self._known:
            key = key_of(row.spec) if self._keeps else None
            has_text = bool(row.spec.prediction_ids) or (key is not None and self._memory.knows(key))
            self._known[row] = key, has_text
        return self._known[row]

    def remove(self, row: Row) -> Key | None:
        """It has left; where what others have written behind its prompt is kept, if that is known."""
        return self._known.pop(row, (None, False))[0]

    def sources(self, rows: Sequence[Row]) -> dict[Row, Source]:
        """Take in as many new rows as a step has time for."""
        sources: dict[Row, Source] = {}
        left = NEW_AT_ONCE
        for row in rows:
            if left <= 0:
                break
            sources[row] = self._source(row)
            left -= len(row.spec.prompt_ids) + min(FARTHEST, len(row.spec.prediction_ids))
        return sources

    def _source(self, row: Row) -> Source:
        spec = row.spec
        predicted = spec.prediction_ids[:FARTHEST]
        prompt = spec.prompt_ids[-FARTHEST if self._config.prompt_lookup else -ANCHOR :]
        text = Text(text_behind(spec.prompt_ids, predicted)) if predicted else None
        chance, key = Chance(self.chance(row).value), self._look_at(row)[0]
        source = Source(Text([*prompt, *row.tokens]), len(row.tokens), chance, text, key, len(prompt))
        if text is not None and not row.tokens:
            source.predicted.begin(text.ids, len(text) - len(predicted))
        return source


def try_of(row: Row, source: Source | None, draft: Sequence[int]) -> Try:
    """A row's part of a step in which its draft may be checked; `source`: None where it has not been looked at yet.

    Of a row for whose tokens no client waits only the sum counts.
    """
    pace = math.inf if row.spec.sequence_class != "interactive" else 1.0 if source is None else source.chance.pace
    return Try(0.0, 0, pace) if source is None else Try(source.likely, len(draft), pace)


def up_to_stop(row: Row, draft: list[int]) -> list[int]:
    """Without the token that ends the row: what is drawn behind a draft comes with it in any case."""
    if not row.stop_ids or row.stop_ids.isdisjoint(draft):
        return draft
    return next((draft[:at] for at, id_ in enumerate(draft) if id_ in row.stop_ids), draft)
