"""The rows that a draft model reads along with, and what it says of how they go on.

All rows that want a draft share its forwards. It draws with each row's own noise, behind the same penalties, masks and
grammar, so at any temperature it says what the model says wherever the two are of one mind. Adapters it does not know.

A row's prompt is fed in pieces, once for all rows of that prompt. From then on it is fed what the row has come to hold
since: the ids of a draft that was refused are taken back before, together with as many more as make the next forward
equally wide for all rows. So nothing is padded; rows end at different positions of the batch (kv/ragged.py).

Invariants. A row has as many ids in the KV as `known` and `guessed` say; those in `known` are the row's own for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_model.config import EngineConfig
from mlx_model.draft import DraftModel
from mlx_model.kv.kinds import keep_rows, ragged, take_back
from mlx_model.loader import LoadedModel
from worker.engine.batch.prompt_group import Entry, PromptGroup, extend
from worker.engine.batch.row import Row, RowTag
from worker.engine.batch.row_model import RowModel
from worker.engine.batch.sampler import Guesses
from worker.engine.scheduler import ChunkSize

CATCH_UP = 64  # ids of a row that are fed at once, at most, when it has gone on without drafts
Ids = tuple[int, ...]


class RowFailedError(Exception):
    """Raised where what is computed for one row alone fails; all others are as they were."""

    def __init__(self, row: Row) -> None:
        super().__init__(row.spec.id)
        self.row = row


class DraftBatch:
    """The rows that the draft model of one engine has read or reads."""

    def __init__(self, draft: DraftModel, vocab: int, chunk: ChunkSize, prompt_ids: int) -> None:
        """`vocab`: of the model that it drafts for; `chunk`: ids fed at once; `prompt_ids`: of a prompt, 0: all."""
        self._model = _UntaggedModel(draft.model, None, draft.kv)
        self._draft = draft
        self._vocab = vocab
        self._chunk = chunk
        self._prompt_ids = prompt_ids
        self._waiting: dict[Ids, list[Row]] = {}  # by what is to be read first, in order of arrival
        self._group: PromptGroup | None = None  # that is being fed
        self._feeding: list[list[Row]] = []  # the rows of each of its prompts
        self._cache: list[Any] = []  # of the rows that are through; the tag is the last one
        self._padding: list[int] = []
        self._slack: list[int] = []  # positions by which each row ends before the one that ends last
        self._read: dict[Row, _Read] = {}  # of every row that is here

    @property
    def name(self) -> str:
        return self._draft.name

    def __contains__(self, row: Row) -> bool:
        return row in self._read

    def __len__(self) -> int:
        return len(self._read)

    @property
    def rows(self) -> tuple[Row, ...]:
        return cast(RowTag, self._cache[-1]).rows if self._cache else ()

    def length(self, row: Row) -> int:
        """Ids of a row that are to be read, its next input included."""
        return len(row.spec.prompt_ids) - self._start(row) + row.position

    def room(self, row: Row) -> int:
        """How many more ids the model may read of a row."""
        return self._draft.context_length - self.length(row)

    # -- prompts

    def add(self, row: Row) -> None:
        context = [*row.spec.prompt_ids, *(row.tokens if len(row.tokens) > CATCH_UP else ())]
        ids = tuple(context[self._start(row) :])
        self._read[row] = _Read(len(ids))
        self._waiting.setdefault(ids, []).append(row)

    @property
    def feeds(self) -> bool:
        return bool(self._waiting or self._group is not None)

    def feed(self) -> int:
        """Feed the next piece of prompts; how many ids that was."""
        if self._group is None:
            prompts = self._next_prompts()
            self._feeding = [self._waiting.pop(ids) for ids in prompts]
            entries = [Entry(rows[:1], [*self._fit(ids), 0]) for ids, rows in zip(prompts, self._feeding, strict=True)]
            self._group = PromptGroup(self._model, entries)
        rows, width = self._group.feed(self._chunk.tokens)
        mx.eval(self._group.state)
        if not self._group.left:
            group, self._group = self._group, None
            self._join(group)
        return rows * width

    def _next_prompts(self) -> list[Ids]:
        """The first one that waits, or as many as go together in one piece."""
        first, *others = self._waiting
        chosen, longest = [first], len(first)
        for ids in others:
            longest = max(longest, len(ids))
            if longest * (len(chosen) + 1) > self._chunk.tokens:
                break
            chosen.append(ids)
        return chosen

    def _join(self, group: PromptGroup) -> None:
        each = [(row, place) for place, rows in enumerate(self._feeding) for row in rows]
        self._feeding = []
        if not each:
            return
        group.become([row for row, _ in each], [place for _, place in each])
        if self._cache:
            self._padding = extend(self._cache, self._padding, group)
        else:
            *caches, tag = group.cache
            self._cache, self._padding = [*ragged(caches), tag], group.padding
        self._take_back([0] * len(self.rows), [*self._slack, *[0] * len(each)])

    def remove(self, gone: set[Row]) -> None:
        if gone.isdisjoint(self._read):
            return
        for row in gone:
            self._read.pop(row, None)
        self._waiting = {ids: left for ids, rows in self._waiting.items() if (left := _without(rows, gone))}
        self._feeding = [_without(rows, gone) for rows in self._feeding]
        if not any(self._feeding):
            self._group = None
        keep = [at for at, row in enumerate(self.rows) if row not in gone]
        if not keep:
            self._cache, self._padding, self._slack = [], [], []
        elif len(keep) < len(self.rows):
            with mx.stream(generation_stream):
                self._padding = keep_rows(self._cache, keep, self._padding)
                self._take_back([0] * len(keep), [self._slack[at] for at in keep])

    # -- drafts

    def drafts(self, inputs: Mapping[Row, int], lengths: Mapping[Row, int]) -> dict[Row, list[int]]:
        """How rows go on behind their next inputs, each so far; {} for one that has to catch up first.

        `inputs`: of all rows that decode; `lengths`: of those rows of the batch that want a draft.
        """
        rows = self.rows
        ahead = {row: _ahead(row, inputs[row]) for row in lengths}
        width = self._rewind(rows, lengths)
        parts = []
        for row in rows:
            read = self._read[row]
            parts.append(self._ids_of(row, inputs[row], read.known, read.known + width))
            read.known += width
        chosen = [at for at, row in enumerate(rows) if row in lengths and self._read[row].known == self.length(row)]
        if not chosen:
            self._forward(mx.array([self._fit(part) for part in parts]))
            return {}
        most = max(lengths[rows[at]] for at in chosen)
        index = None if len(chosen) == len(rows) else mx.array(chosen)
        guesses = Guesses(tuple(ahead[rows[at]] for at in chosen), self._vocab)
        inputs_BL = mx.array([self._fit(part) for part in parts])
        fed_N = mx.array([parts[at][-1] for at in chosen])
        drawn: list[mx.array] = []
        while True:
            logits_BV = self._forward(inputs_BL)
            fed_N = guesses.draw(logits_BV if index is None else logits_BV[index], fed_N)
            drawn.append(fed_N)
            if len(drawn) == most:
                break
            inputs_BL = self._next_inputs(fed_N, index, len(rows))
        told = cast(list[list[int]], mx.stack(drawn, axis=1).tolist())
        for row in rows:
            self._read[row].guessed = [-1] * (most - 1)
        for at, ids in zip(chosen, told, strict=True):
            self._read[rows[at]].guessed = ids[:-1]
        return {rows[at]: ids[: lengths[rows[at]]] for at, ids in zip(chosen, told, strict=True)}

    def _rewind(self, rows: Sequence[Row], wanted: Mapping[Row, int]) -> int:
        """Take back what was guessed wrong, and so much that all rows are fed equally much next: how much."""
        before = [self._read[row].size for row in rows]
        for row in rows:
            self._read[row].settle(_ids_from(row, self._start(row) + self._read[row].known))
        unread = max(self.length(row) - self._read[row].known for row in rows if row in wanted)
        most = max(2, min(CATCH_UP, self._chunk.tokens // len(rows)))
        width = max(1, min(unread, most, min(map(self.length, rows))))
        for row in rows:
            read = self._read[row]
            read.known = min(read.known, self.length(row) - width)
        unused = [size - self._read[row].known for size, row in zip(before, rows, strict=True)]
        if any(unused):
            self._take_back(unused, self._slack)
        return width

    def _take_back(self, unused: Sequence[int], slack: Sequence[int]) -> None:
        """Forget the last so many positions of each row; `slack` is what it was."""
        self._slack = take_back(self._cache[:-1], unused, slack)

    def _forward(self, inputs_BL: mx.array) -> mx.array:
        """Logits [B, V] behind the last inputs, as wide as the model's."""
        logits_BV = self._model(inputs_BL, cache=self._cache)[:, -1, : self._vocab]
        missing = self._vocab - logits_BV.shape[-1]
        return mx.pad(logits_BV, [(0, 0), (0, missing)], constant_values=-mx.inf) if missing else logits_BV

    def _next_inputs(self, drawn_N: mx.array, index: mx.array | None, rows: int) -> mx.array:
        """Ids that are fed next [B, 1]; rows without a draft are fed anything."""
        fed_N = mx.minimum(drawn_N, self._draft.vocab_size - 1).astype(mx.int32)
        if index is not None:
            inputs_B = mx.zeros((rows,), mx.int32)
            inputs_B[index] = fed_N
            return inputs_B[:, None]
        return fed_N[:, None]

    def _start(self, row: Row) -> int:
        return max(0, len(row.spec.prompt_ids) - self._prompt_ids) if self._prompt_ids else 0

    def _ids_of(self, row: Row, token: int, low: int, high: int) -> list[int]:
        """Some of the ids that are to be read; `token` is its next input."""
        ids = _ids_from(row, low + self._start(row))
        return [*ids, token][: high - low] if row.position > len(row.tokens) else ids[: high - low]

    def _fit(self, ids: Sequence[int]) -> list[int]:
        """Without ids that the draft model does not have: then it guesses badly, but reads only its own weights."""
        last = self._draft.vocab_size - 1
        return [min(id_, last) for id_ in ids]


@dataclass
class _Read:
    """Ids that lie in the KV of one row."""

    known: int  # ids that are the row's own
    guessed: list[int] = field(default_factory=list)  # behind them

    @property
    def size(self) -> int:
        return self.known + len(self.guessed)

    def settle(self, told: Sequence[int]) -> None:
        """Keep what was guessed as far as that is what has been told behind the known ids."""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(told, self.guessed, strict=False))
        self.known += sum(1 for _ in same)
        self.guessed = []


class _UntaggedModel(RowModel):
    """Computes with nobody's adapter, and leaves no trace in the rows."""

    def feed(self, ids_BL: list[list[int]], starts_B: Sequence[int], cache: list[Any]) -> mx.array:
        """It has no eyes for a row's images, whose ids are plain ones here."""
        return self(mx.array(ids_BL), cache=cache)

    def _enter(self, tag: RowTag) -> None:
        return


def _ids_from(row: Row, at: int) -> list[int]:
    """Prompt and completion from a place on, as far as they have been told."""
    prompt = row.spec.prompt_ids
    return [*prompt[at:], *row.tokens[max(0, at - len(prompt)) :]]


def _ahead(row: Row, token: int) -> Row:
    """The row as it draws behind its next input."""
    place = row.place
    if place is not None and place.taken < row.position:
        place.take(token)
    try:
        return row.ahead(row.tokens_behind(token), None if place is None else place.copy(), 0)
    except Exception as error:
        raise RowFailedError(row) from error


def draft_batch(loaded: LoadedModel, config: EngineConfig, chunk: ChunkSize) -> DraftBatch | None:
    """An empty one; None: there is no draft model."""
    if loaded.draft is None or config.speculation is None:
        return None
    return DraftBatch(loaded.draft, loaded.card.vocab_size, chunk, config.speculation.draft_context)


def _without(rows: Sequence[Row], gone: set[Row]) -> list[Row]:
    return [row for row in rows if row not in gone]
