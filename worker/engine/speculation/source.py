"""What is known of one row: the texts that it may go on along, how its drafts have held, and what the next one says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_model.config import SpeculationConfig
from worker.engine.batch.row import Row
from worker.engine.speculation.alignment import WINDOW, Course, End
from worker.engine.speculation.lookup import BEGINNING, NOTHING, Guess, History, Text
from worker.engine.speculation.memory import ANCHOR, FARTHEST, Joined, Key, Memory, key_of, text_behind
from worker.engine.speculation.payoff import UNLIKELY, Chance, Try

NEW_AT_ONCE = 1 << 13  # ids of new rows in one step, one row at least: a long text takes milliseconds to be taken in


@dataclass
class Source:
    """Of one row."""

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

    def add(self, ids: list[int]) -> None:
        """The row has gone on with these."""
        self.history.add(ids)
        for each in (self.own, self.predicted, self.kept):
            each.follow(ids, self.history)
        self.told += len(ids)

    @property
    def written(self) -> int:
        """Ids behind the prompt."""
        return len(self.history) - self.prompt


class Texts:
    """Which rows had a text to draft from besides their own when they came: how drafts of such rows hold, and whether
    they pay, says nothing of the others'."""

    def __init__(self, memory: Memory, *, keeps: bool) -> None:
        self._memory, self._keeps = memory, keeps
        self._known: dict[Row, tuple[Key | None, bool]] = {}
        self._chances = {has: Chance() for has in (True, False)}

    def chance(self, row: Row) -> Chance:
        """Of drafts of all such rows lately: what a new one begins with."""
        return self._chances[self._look_at(row)[1]]

    def key(self, row: Row) -> Key | None:
        """Of what others have written behind its prompt; None: that is not kept."""
        return self._look_at(row)[0]

    def of_most(self, rows: Sequence[Row]) -> bool:
        """Whether half of them had, or more, as far as this step has time to look at those that are new."""
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
        """Whether all of them have been looked at."""
        return all(row in self._known for row in rows)

    def _look_at(self, row: Row) -> tuple[Key | None, bool]:
        if row not in self._known:
            key = key_of(row.spec) if self._keeps else None
            has_text = bool(row.spec.prediction_ids) or (key is not None and self._memory.knows(key))
            self._known[row] = key, has_text
        return self._known[row]

    def remove(self, row: Row) -> None:
        """It has left."""
        self._known.pop(row, None)


def pace(row: Row, source: Source | None = None) -> float:
    """Tokens of a step that checks drafts, lately; of a row for whose tokens nobody waits only the sum counts."""
    if row.spec.sequence_class != "interactive":
        return math.inf
    return 1.0 if source is None else source.chance.pace


def try_of(row: Row, source: Source | None, draft: Sequence[int]) -> Try:
    """A row's part of a step in which its draft may be checked; `source`: None where it has not been looked at yet."""
    return Try(0.0, 0, pace(row)) if source is None else Try(source.likely, len(draft), pace(row, source))


def up_to_stop(row: Row, draft: list[int]) -> list[int]:
    """Without the token that ends the row: what is drawn behind a draft comes with it in any case."""
    if not row.stop_ids or row.stop_ids.isdisjoint(draft):
        return draft
    return next((draft[:at] for at, id_ in enumerate(draft) if id_ in row.stop_ids), draft)


def source_of(row: Row, config: SpeculationConfig, texts: Texts) -> Source:
    """Of a new row."""
    spec = row.spec
    predicted = spec.prediction_ids[:FARTHEST]
    prompt = spec.prompt_ids[-FARTHEST if config.prompt_lookup else -ANCHOR :]
    source = Source(
        History([*prompt, *row.tokens]),
        len(row.tokens),
        Chance(texts.chance(row).value),
        Text(text_behind(spec.prompt_ids, predicted)) if predicted else None,
        texts.key(row),
        prompt=len(prompt),
    )
    if source.prediction is not None and not row.tokens:
        text = source.prediction.ids
        source.predicted.begin(text, len(text) - len(predicted))
    return source


def new_sources(rows: Sequence[Row], config: SpeculationConfig, texts: Texts) -> dict[Row, Source]:
    """Of as many new rows as a step has time for."""
    sources: dict[Row, Source] = {}
    left = NEW_AT_ONCE
    for row in rows:
        if left <= 0:
            break
        sources[row] = source_of(row, config, texts)
        left -= len(row.spec.prompt_ids) + min(FARTHEST, len(row.spec.prediction_ids))
    return sources


def draft(
    row: Row, source: Source, config: SpeculationConfig, by_model: float, looked_through: int, behind: int
) -> list[int]:
    """What the row may go on with; [] while nothing suggests itself.

    `by_model`: the chance of a draft model's drafts; `looked_through`: ids of a text, at most; `behind`: the row may
    have gone on by so many ids that are not known, so as many more are wanted.
    """
    room = row.sampling.max_tokens - row.position
    if source.rests or room <= 1:
        return []  # what is drawn behind the draft comes with it
    source.likely = source.chance.value
    is_doubtful = config.adapts_to_rows and source.likely < max(config.threshold, by_model)
    least = config.ngram_max if is_doubtful else config.ngram_min
    most = source.chance.length(config.tokens) if config.adapts_to_rows else config.tokens
    most, longest = min(most + behind, room - 1), min(config.tokens + behind, room - 1)
    source.is_predicted = source.by_model = False
    joined = source.joined
    if joined is not None and source.prediction is None and source.written < BEGINNING:
        written = source.history.end(source.written)
        if (guess := joined.beginnings.draft(written, longest)).ids:
            return _worth(row, source, config, guess, behind)
    guess, far, has_slipped = NOTHING, min(FARTHEST, looked_through), False
    history = source.history
    end = End(history.end(WINDOW), least)
    if joined is not None:
        guess = source.kept.draft(joined.text, slice(-far, None), end, longest)
        has_slipped = source.kept.has_slipped
    if source.prediction is not None:
        theirs = source.predicted.draft(source.prediction, slice(far), end, most)
        has_slipped |= source.predicted.has_slipped
        if theirs.ids and theirs.matched >= guess.matched:
            guess, source.is_predicted = theirs, True
    # What the row has written itself counts where more of its end is found there: no more than is looked for.
    is_sure = guess.matched >= config.ngram_max or has_slipped
    if config.own_text and (not is_sure or source.own.is_along(least)):
        end = End(end.ids[-config.ngram_max :], least)
        own = source.own.draft(history, slice(-far, None), end, most)
        if own.matched > guess.matched:
            guess, source.is_predicted = own, False
    return _worth(row, source, config, guess, behind)


def _worth(row: Row, source: Source, config: SpeculationConfig, guess: Guess, behind: int) -> list[int]:
    """As much of a draft as is likely to be reached, as far as the row is known."""
    if guess.votes and not behind and config.adapts_to_rows:
        agreed, source.likely = guess.agreed(source.likely, UNLIKELY)
        return up_to_stop(row, guess.ids[:agreed])
    return up_to_stop(row, guess.ids)
