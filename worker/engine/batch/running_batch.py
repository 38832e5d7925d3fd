"""The running batch: rows that decode together, and the prompts that are on their way into it.

It stands on mlx-lm's models and batched caches (mlx_lm/models/cache.py) and does what its `BatchGenerator` does, so
tokens are equal; but prompts join in groups (prompt_group.py), interactive ones first, and log-probabilities over the
whole vocabulary are not kept. The look-ahead is the same: when a token comes out, the forward after it is already under
way.

One step: the next prompts' forward, first tokens of those that are through, the decode step; then the tokens of the
step before are told. Where interactive prompts wait with batch rows, or nothing decodes, first tokens have a forward
of their own before the decode step (on a CPU instead of it, at most three times in a row); else the last token of a
prompt is fed in the next decode step, which saves one.

Invariants. Limits, stop tokens and finish reasons are the caller's. From insert to remove a row is in exactly one of
`_unfed`, a group and the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_model.config import EngineConfig
from mlx_model.device import on_cpu
from mlx_model.kv.kinds import end_of, keep_rows, share_offsets
from shared.frames import TokenEvent
from shared.sequences import SequenceClass
from worker.engine.batch.keeping import Keeping
from worker.engine.batch.prompt_group import Entry, PromptGroup, extend, kv_in, with_stop
from worker.engine.batch.prompts_in_flight import Pieces
from worker.engine.batch.row import Row, RowTag, report_tokens
from worker.engine.batch.row_model import RowModel
from worker.engine.batch.sampler import RowSampler
from worker.engine.batch.shared_prompts import SharedPrompts
from worker.engine.prefixes.slabs import KvRows
from worker.engine.scheduler import PASSES, Unfed, feed_next


class RunningBatch:
    """The rows that prefill and decode together."""

    def __init__(
        self,
        model: RowModel,
        config: EngineConfig,
        pieces: Pieces,
        keeping: Keeping,
        shared: SharedPrompts,
        *,
        draws_late: bool = False,
    ) -> None:
        """`draws_late`: not when a forward begins but in the next step, for others may compute before it has come."""
        self._model = model
        self._draws_late = draws_late
        self._undrawn = False  # what the next decode step feeds is still to be drawn
        self._pieces = pieces
        self._keeping = keeping
        self._shared = shared
        self._sampler = RowSampler(model, config.top_candidates)
        self._most = config.prefill_rows
        self._unfed: list[Entry] = []  # in order of arrival
        self._groups: list[PromptGroup] = []  # that have begun and are not through
        self._after_short: dict[SequenceClass, bool] = {}
        self._cache: list[Any] = []  # of the rows that decode; the tag is the last one
        self._padding: list[int] = []  # positions before the first one of each row
        self._next_B = mx.array([], mx.uint32)  # what the next decode step feeds
        self._untold: set[Row] = set()  # rows whose next input is not news: it ends their prompt, or has been reported
        self._prefilling: dict[Row, None] = {}  # have no first token yet, in order of arrival
        self._inserted: set[Row] = set()
        self._turn = 0
        self._passed = 0  # consecutive steps that reported first tokens and decoded nothing
        self._events: list[TokenEvent] = []  # that have not been taken
        self.started: list[Row] = []  # got their first token in the latest step
        self.unfed = 0  # tokens of each row that the latest step has reported and not fed
        self.has_decoded = False  # the latest step has fed the rows that decode, though it may have reported nothing
        # On a CPU, MLX computes while it dispatches: there a first token would wait for all of the next decode step.
        self._tells_at_once = on_cpu()

    def __len__(self) -> int:
        return len(self._inserted)

    def __contains__(self, row: Row) -> bool:
        return row in self._inserted

    @property
    def cache(self) -> Sequence[Any]:
        """KV of the rows that decode, by layer, and their tag; empty without such rows."""
        return self._cache

    @property
    def groups(self) -> Sequence[PromptGroup]:
        """Groups of prompts that have begun and are not through."""
        return self._groups

    @property
    def holds_nothing(self) -> bool:
        """True if no row has left anything behind: no entry, group, KV or undrawn step."""
        kept = self._inserted or self._unfed or self._groups or self._cache or self._untold or self._prefilling
        return not (kept or self._undrawn)

    def check(self) -> None:
        """AssertionError unless each row is in exactly one place: an unfed entry, a group, or the rows that decode."""
        places = [row for entry in self._unfed for row in entry.rows]
        places += [row for group in self._groups for row in group.rows]
        places += self._decoding_rows
        assert len(places) == len(set(places)) and set(places) == self._inserted, "a row is in no place, or in two"
        assert self._untold <= set(self._decoding_rows), "news are due of a row that does not decode"

    def give_up(self) -> list[Row]:
        """After a failed forward: the rows, which hold nothing here any more. The batch is not to be used again."""
        rows = list(self._inserted)
        self._inserted.clear()
        return rows

    @property
    def prefilling_rows(self) -> Collection[Row]:
        """Rows that have no first token yet."""
        return self._prefilling.keys()

    @property
    def waiting(self) -> set[SequenceClass]:
        """Classes of the prompts that are not through."""
        rows = [entry.rows[0] for entry in self._unfed if len(entry.ids) > 1]
        rows += [group.rows[0] for group in self._groups]
        return {row.spec.sequence_class for row in rows}

    def has_begun(self, of: SequenceClass) -> bool:
        """True if prompts of a class are being computed."""
        return any(group.rows[0].spec.sequence_class == of for group in self._groups)

    @property
    def decoding(self) -> int:
        """Rows that get a token in every step."""
        return len(self._inserted) - len(self._prefilling)

    @property
    def spared(self) -> int:
        """Positions of KV that are not stored because rows share what they begin with."""
        return self._shared.spared(self._decoding_rows)

    @property
    def stream(self) -> Any:
        """The stream that the batch computes on."""
        return generation_stream

    def insert(self, entry: Entry) -> None:
        """Add rows, whose KV is copied for each of them."""
        self._unfed.append(entry)
        self._inserted.update(entry.rows)
        self._prefilling.update(dict.fromkeys(entry.rows))

    def stop_between(self, row: Row, low: int, high: int) -> bool:
        """Store the states of a row's prompt somewhere between these positions; False when it is past them."""
        for entry in self._unfed:
            if row in entry.rows and entry.past < high < entry.past + len(entry.ids):
                entry.stops = with_stop(entry.stops, max(low, entry.past + 1), high)
                return True
        return any(row in group.rows and group.stop_between(row, low, high) for group in self._groups)

    def remove(self, rows: Iterable[Row]) -> None:
        """Free these rows' places and KV."""
        gone = self._inserted.intersection(rows)
        if not gone:
            return
        self._inserted -= gone
        self._untold -= gone
        self._keeping.remove(gone)
        self._shared.leave(gone)
        for row in gone:
            self._prefilling.pop(row, None)
        for entry in self._unfed:
            entry.rows = [row for row in entry.rows if row not in gone]
        self._unfed = [entry for entry in self._unfed if entry.rows]
        with mx.stream(self.stream):
            self._groups = [group for group in self._groups if not gone.issuperset(group.rows)]
            for group in self._groups:
                if not gone.isdisjoint(group.rows):
                    group.remove(gone)
            if not gone.isdisjoint(self._decoding_rows):
                self._filter(gone)

    def _filter(self, gone: set[Row]) -> None:
        keep = [at for at, row in enumerate(self._decoding_rows) if row not in gone]
        if not keep:
            self._cache, self._padding, self._undrawn = [], [], False
            return
        self._padding = keep_rows(self._cache, keep, self._padding)
        self._next_B = self._next_B[mx.array(keep)]
        if self._undrawn:
            self._model.keep(keep, self._decoding_rows)

    def news(self) -> list[TokenEvent]:
        """Events since the last call, including those of a step that failed."""
        events, self._events = self._events, []
        return events

    def step(self, prefill_tokens: int, of: SequenceClass = "interactive") -> None:
        """One decode step, and about `prefill_tokens` of prompts of one class; each row's new token is news.

        Prompts of rows that have their first token are stored.
        """
        self._turn += 1
        with mx.stream(self.stream):
            self._draw_late()
            early = False
            for group in [*self._through(), *self._feed(prefill_tokens, of)]:
                early |= self._join(group)
            if early and self._tells_at_once and self._passed < PASSES:
                self._passed += 1
                self.has_decoded = False
                self._tell()
            else:
                self._passed, self.has_decoded = 0, bool(self._cache)
                self._decode()
            self._keeping.prompts(self.started, self.kv_of)

    # -- prompts

    def _through(self) -> list[PromptGroup]:
        """Forks, and prompts of one token: nothing is to be fed of them."""
        through = [entry for entry in self._unfed if len(entry.ids) == 1]
        if not through:
            return []
        self._unfed = [entry for entry in self._unfed if len(entry.ids) > 1]
        if self._shared.pays([*self._decoding_rows, *(row for entry in through for row in entry.rows)]):
            return [PromptGroup(self._model, [entry]) for entry in through]  # together they would be copied
        return [PromptGroup(self._model, through)]

    def _feed(self, budget: int, of: SequenceClass) -> list[PromptGroup]:
        """Feed the next prompts of a class; those that are through by it."""
        groups = [group for group in self._groups if group.rows[0].spec.sequence_class == of]
        entries = [entry for entry in self._unfed if entry.rows[0].spec.sequence_class == of]
        if budget <= 0 or not (groups or entries):
            return []
        most = self._most
        if self._shared.is_needed:  # prompts are copies until they join, and admission counts one
            entries, most = [] if groups else entries, 1
        unfed = [Unfed(group.left, group.fed_at, end_of(group.cache)) for group in groups]
        unfed += [Unfed(len(entry.ids) - 1, past=entry.past) for entry in entries]
        after_short = self._after_short.get(of, False)
        feed = feed_next(unfed, budget, most, after_short=after_short, area=self._pieces.area)
        if feed.prompts[0] < len(groups):
            group = groups[feed.prompts[0]]
        else:
            chosen = [entries[at - len(groups)] for at in feed.prompts]
            self._unfed = [entry for entry in self._unfed if entry not in chosen]
            if len(chosen) == 1:
                self._begin(chosen[0])
            group = PromptGroup(self._model, chosen)
            self._groups.append(group)
        is_short = not group.fed_at and group.left <= feed.chunk
        self._after_short[of] = is_short
        group.fed_at = self._turn
        self._feed_group(group, group.left if is_short else feed.chunk)
        if group.left:
            return []
        self._groups.remove(group)
        return [group]

    def begun(self, row: Row, kv: Sequence[Any]) -> tuple[list[Any], int] | None:
        """As `SharedPrompts.begun` has it, for a prompt that is computed with the row's present version."""
        version = self._model.adapters.version(row)
        return self._shared.begun(self._cache, self._decoding_rows, row, version, kv)

    def _begin(self, entry: Entry) -> None:
        """Let a prompt read what it has in common with rows of the batch where that is stored."""
        row, *others = entry.rows
        if others or (begun := self.begun(row, entry.kv or ())) is None:
            return
        kv, length = begun
        entry.ids, entry.kv, entry.past = entry.ids[length - entry.past :], kv, length
        row.take_kv(length, {self._model.adapters.version(row)})

    def _feed_group(self, group: PromptGroup, width: int) -> None:
        """Feed so many tokens of a group, or short prompts to their ends; in pieces, where rows have stops."""
        is_short, positions = width == group.left, 0
        while group.left and width > 0:
            if positions:  # pieces that are computed at once would sum over ranks at once (mlx_model/collectives/cuda)
                mx.async_eval(group.state)  # type: ignore[no-untyped-call]
            rows, fed = group.feed(width)
            self._keeping.at_stops(*group.at_stops(), group.kv_of)
            positions += rows * fed
            width = group.left if is_short else width - fed
        self._pieces.begin(group.state, positions)

    def _join(self, group: PromptGroup) -> bool:
        """Let the rows of a group decode from the next step on; whether their first tokens are under way already."""
        self._cache, self._padding = self._shared.join(self._cache, self._padding, self._decoding_rows, group)
        early = self._is_early(group)
        if early:
            next_B = self._draw(mx.array(group.last_ids), group.cache)
            self._pieces.drop()  # their end is waited for with the first tokens
        else:
            next_B = mx.array(group.last_ids)
            self._untold.update(group.rows)
        if not self._cache:
            self._cache, self._next_B, self._padding = list(group.cache), next_B, group.padding
            return early
        self._padding = extend(self._cache, self._padding, group)
        self._next_B = mx.concatenate([self._next_B, next_B.astype(self._next_B.dtype)])
        return early

    def _is_early(self, group: PromptGroup) -> bool:
        """True if first tokens come before the decode step, at the price of a forward of their own."""
        beside = self._decoding_rows
        if not beside:
            return True
        is_urgent = any(row.spec.sequence_class == "interactive" for row in group.rows)
        return is_urgent and 2 * sum(row.spec.sequence_class == "batch" for row in beside) > len(beside)

    # -- decoding

    @property
    def _decoding_rows(self) -> tuple[Row, ...]:
        return cast(RowTag, self._cache[-1]).rows if self._cache else ()

    def _draw(self, inputs_B: mx.array, cache: Sequence[Any]) -> mx.array:
        """Feed one token of each row and begin to compute the next one [B]."""
        self._one_token(inputs_B, cache)
        return self._sampler()

    def _one_token(self, inputs_B: mx.array, cache: Sequence[Any]) -> None:
        """Feed one token of each row; the model keeps the logits until they are drawn from."""
        self._model(inputs_B[:, None], cache=list(cache), draws=not self._draws_late)
        share_offsets(cache[:-1])

    def _decode(self) -> None:
        """Begin the next decode step, and report its inputs."""
        self.started, self.unfed = [], 0
        if not self._cache:
            return
        inputs_B, rows = self._next_B, self._decoding_rows
        if self._draws_late:
            self._one_token(inputs_B, self._cache)
            self._undrawn = True
        else:
            self._next_B = self._draw(inputs_B, self._cache)
        untold, self._untold = self._untold, set()
        self._told(rows, cast(list[int], inputs_B.tolist()), untold)

    def _draw_late(self) -> None:
        """Draw what the step before has left."""
        if self._undrawn:
            self._undrawn = False
            self._next_B = self._sampler()

    def _tell(self) -> None:
        """Report the inputs of the next decode step before it begins."""
        rows, untold = self._decoding_rows, self._untold
        self._untold, self.unfed = set(rows), 1
        self._told(rows, cast(list[int], self._next_B.tolist()), untold)

    def stop_ahead(self) -> None:
        """Report what has been drawn, and do not feed it: each row's KV ends before its last token."""
        if not self._cache:
            return
        self._draw_late()
        self._tell()
        self._keeping.prompts(self.started, self.kv_of)  # the next step knows only those that start in it

    def keep_answers(self, ended: list[Row]) -> None:
        """Store what these have written; they leave next."""
        self._keeping.answers(ended, self.unfed, self.kv_of, undrawn=int(self._undrawn))

    def set_aside(self, rows: Iterable[Row]) -> None:
        """Keep the KV of rows that are about to leave and go on later, or elsewhere."""
        gone = set(rows)
        self._keeping.set_aside([row for row in self._decoding_rows if row in gone], self.unfed, self.kv_of)
        for group in self._groups:
            if gone.intersection(group.rows):
                self._keeping.at_stops(*group.progress, group.kv_of)

    def _told(self, rows: Sequence[Row], fed: Sequence[int], untold: set[Row]) -> None:
        self._add_news([(row, token) for row, token in zip(rows, fed, strict=True) if row not in untold])

    def _add_news(self, tokens: list[tuple[Row, int]]) -> None:
        """Report a step's tokens; rows whose first token is among them have started."""
        reported = dict.fromkeys(row for row, _ in tokens) if self._prefilling else ()
        self.started = [row for row in reported if row in self._prefilling]
        for row in self.started:
            del self._prefilling[row]
        report_tokens(tokens, self._events)

    def kv_of(self, rows: list[Row]) -> KvRows:
        """The KV of rows that decode, as it lies in the batch."""
        return kv_in(self._cache, rows, self._padding)
