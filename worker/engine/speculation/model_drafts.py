"""When a draft model drafts, for which rows, and how far.

Its forwards take time of their own, so a step with its drafts pays only when what is accepted of them makes up for that
time, too; and a row's prompt, which it has to read first, only when the row has enough to say. Both are told by the
clock: how long its forwards, and the ids of its prompts, have taken lately, and how often it was right. While little is
known it reads along with few rows; where it did not pay it is tried again after `STALE` steps.

Where something fails for one row alone, that row goes on without drafts. Where the draft model itself fails, all rows
that it has read do; after `FAILURES` times with no draft between them it is left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from mlx_model.config import SpeculationConfig
from worker.engine.batch.row import Row
from worker.engine.speculation.draft_batch import DraftBatch, RowFailedError
from worker.engine.speculation.payoff import SHARED_RECENT, STALE, Chance, Costs, Try, best_step, brought

log = logging.getLogger(__name__)

PROBES = 8  # drafts, or times that none would pay, after which it is known how good the model is
FEW = 2  # rows that it reads along with before
SHORTEST = 4  # ids that a row may still say, at least, for the model to begin with it
LONGEST_REST = 32  # steps, of a batch in which its drafts do not pay
FAILURES = 2  # of the model, with no draft between them
SAID = 0.5  # of what a row may still say, the part that it is taken to say


class ModelDrafts:
    """The drafts that a model makes for the rows of one engine."""

    def __init__(self, batch: DraftBatch, config: SpeculationConfig, clock: Callable[[], float]) -> None:
        self._batch = batch
        self._config = config
        self._clock = clock
        self._chances: dict[Row, Chance] = {}
        self._resting: set[Row] = set()  # in this step
        self._rest = self._losses = 0  # steps without its drafts, since they did not pay lately
        self._chance = Chance()
        self._probes = 0
        self._costs = Costs()  # of its own forwards
        self._id_s = 0.0  # an id of a prompt
        self._idle = 0  # steps since the latest draft
        self._failures = 0
        self._refused: set[Row] = set()  # rows that go on without, since something has failed

    @property
    def has_failed(self) -> bool:
        """True if it is left alone from now on."""
        return self._failures >= FAILURES

    @property
    def name(self) -> str:
        """The name of the model; "" when it has failed."""
        return "" if self.has_failed else self._batch.name

    # -- prompts

    def read_along(self, rows: Sequence[Row], times: Costs) -> bool:
        """Begin with rows where that pays, and feed a piece of their prompts; whether anything was computed."""
        if self.has_failed:
            return False
        self._idle += 1
        if self._idle >= STALE:
            self._idle, self._chance, self._probes, self._costs = 0, Chance(), 0, Costs()
        for row in self._worth_reading(rows, times):
            self._chances[row] = Chance(self._chance.value)
            self._batch.add(row)
        if not self._batch.feeds:
            return False
        began = self._clock()
        try:
            fed = self._batch.feed()
        except Exception as error:
            self._fail(error)
            return True
        self._id_s += ((self._clock() - began) / fed - self._id_s) * (SHARED_RECENT if self._id_s else 1.0)
        return True

    def _worth_reading(self, rows: Sequence[Row], times: Costs) -> list[Row]:
        new = [row for row in rows if row not in self._batch and self._is_servable(row)]
        if not new or not self._config.adapts_to_time:
            return new
        if self._probes < PROBES:
            return new[: max(0, FEW - len(self._batch))]
        plain = times.known(len(rows), 1)
        each = Try(self._chance.value, self._chance.length(self._config.tokens), 1.0)
        none = [Try(0.0, 0, 1.0)] * len(rows)
        longest, by_model = best_step(times, none, [each] * len(rows), self.forward_s, alone=True)
        if plain is None or not by_model:
            return []
        took = (times.likely(len(rows), longest + 1) or plain) + longest * self.forward_s
        tokens, _ = brought([each], longest)
        saved = plain - took / tokens[-1]  # by a token of each row
        return [row for row in new if self._saves(row, saved / len(rows))]

    def _is_servable(self, row: Row) -> bool:
        if row in self._refused:
            return False
        left = row.sampling.max_tokens - row.position
        return left >= SHORTEST and self._batch.room(row) > self._config.tokens + SHORTEST

    def _saves(self, row: Row, saved_s: float) -> bool:
        """True if a row saves more, so much by each token, than the reading of its prompt takes."""
        left = (row.sampling.max_tokens - row.position) * SAID
        return left * saved_s > self._batch.length(row) * self._id_s

    # -- drafts

    def begin(self, step: int) -> None:
        """A step begins, in which rows whose drafts keep failing get none; those that the model has no room for leave.

        They would be fed with the others, whoever wants a draft.
        """
        self.remove([row for row in self._chances if self._batch.room(row) <= self._config.tokens])
        self._rest = max(0, self._rest - 1)
        if self._config.adapts_to_rows:
            self._resting = {row for row in self._batch.rows if self._chances[row].pauses(step)}

    def lengths(self, rows: Iterable[Row]) -> dict[Row, int]:
        """How long drafts of these rows may be, of those that may get one now."""
        if self.has_failed or self._rest:
            return {}
        ready = set(self._batch.rows).difference(self._resting)
        return {row: length for row in rows if row in ready and (length := self._longest(row)) > 0}

    def judge(self, *, pays: bool) -> None:
        """Rest if its drafts would not pay in this step: ever longer while they do not."""
        self._losses = 0 if pays else self._losses + 1
        self._rest = 0 if pays else min(LONGEST_REST, 1 << self._losses)
        self._probes += not pays

    def _longest(self, row: Row) -> int:
        config = self._config
        most = self._chances[row].length(config.tokens) if config.adapts_to_rows else config.tokens
        return min(most, row.sampling.max_tokens - row.position - 1)  # what is drawn behind the draft comes with it

    def chance(self, row: Row) -> float:
        """How likely the next token of its draft is accepted; 0 where it gets none."""
        return self._chances[row].value if row in self._chances and not self.has_failed else 0.0

    @property
    def forward_s(self) -> float:
        """Seconds that one of its forwards is expected to take; 0 while that is not known."""
        return self._costs.forward_s(len(self._batch.rows))

    def drafts(self, inputs: Mapping[Row, int], lengths: Mapping[Row, int]) -> tuple[dict[Row, list[int]], float]:
        """How these rows go on, each so far at most, and the seconds that took; `inputs` of all rows that decode."""
        began = self._clock()
        try:
            drafts = self._batch.drafts(inputs, lengths)
            self._failures = 0 if drafts else self._failures
        except RowFailedError as error:
            self._refuse(error)
            drafts = {}
        except Exception as error:
            self._fail(error)
            drafts = {}
        took = self._clock() - began
        if drafts:
            self._idle = 0
            self._costs.took(len(self._batch.rows), 0, took / max(lengths[row] for row in drafts))
        return drafts, took

    def learn(self, row: Row, drafted: int, accepted: int) -> None:
        self._chances[row].learn(drafted, accepted)
        self._chance.learn(drafted, accepted, SHARED_RECENT)
        self._probes += 1

    def remove(self, rows: Iterable[Row]) -> None:
        left = set(rows)
        gone = {row for row in left if self._chances.pop(row, None) is not None}
        self._resting -= gone
        self._refused -= left
        self._batch.remove(gone)

    def _refuse(self, error: RowFailedError) -> None:
        log.warning("engine.row_not_drafted_for seq=%s: it goes on without", error.row.spec.id, exc_info=error)
        self.remove([error.row])
        self._refused.add(error.row)

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        says = "rows go on without it" if self.has_failed else "the rows that it has read go on without it"
        log.error("engine.draft_model_failed: %s", says, exc_info=error)
        rows = list(self._chances)
        self.remove(rows)
        self._refused.update(rows)
