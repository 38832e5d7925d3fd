"""A batch whose steps may check drafts: rows with drafts of any length, and rows without, share one forward.

A row is fed its next input and then its draft. At each of these places its token is drawn as it would be without a
draft: from the same logits, with the noise of its seed and of that position, behind the tokens before it. The draft
holds as far as it says what was drawn; the draw after that is the next input. So a draft decides how soon a token
comes, and never which.

Rows are padded to the longest draft. What was fed in vain is taken back from the KV (kv/kinds.py), whose rows may end
at different positions from then on. Recurrent layers cannot forget what they have read: where a draft has not held to
its end, all rows go back to where the step began and read again what holds. If such layers read padding, too, rows
move on by equally much: as far as the shortest draft goes and holds.

Invariants. Before a step that checks, the host knows what it feeds; a step without drafts is `RunningBatch`'s own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from worker.engine.batch.keeping import Keeping
from worker.engine.batch.parted_batch import PartedBatch
from worker.engine.batch.prompt_group import PromptGroup
from worker.engine.batch.prompts_in_flight import Pieces
from worker.engine.batch.row import Row
from worker.engine.batch.row_model import RowModel
from worker.engine.batch.running_batch import RunningBatch
from worker.engine.batch.sampler import Places
from worker.engine.kv.kinds import (
    align,
    end_of,
    expect,
    go_back,
    has_windows,
    have_read,
    keep_rows,
    ragged,
    states,
    take_back,
)
from worker.engine.messages import EngineConfig
from worker.engine.sampling.grammars import Place
from worker.engine.speculation.drafting import Drafting
from worker.engine.speculation.lookup import Ids

Flags = npt.NDArray[np.bool_]

ALIGN_SHARE = 16  # positions: to align these takes about what it costs in one step to write where each row ends
LOOSE = 256  # positions by which a row may fall behind where a window would have to hold them


class SpeculatingBatch(RunningBatch):
    """The rows that prefill and decode together."""

    def __init__(
        self, model: RowModel, config: EngineConfig, pieces: Pieces, keeping: Keeping, drafting: Drafting
    ) -> None:
        super().__init__(model, config, pieces, keeping)
        self._drafting = drafting
        self._move_together = not model.takes_padding  # a row cannot read less than another one
        self._slack: list[int] = []  # positions by which each row ends before the one that ends last
        self._plain_steps = 0  # in a row
        self._joined = False  # rows have, since the step before
        self._known = False  # what the next step is fed: nothing is under way

    def remove(self, rows: Iterable[Row]) -> None:
        """Free these rows' places and KV, and forget their drafts."""
        gone = list(rows)
        self._drafting.remove(gone)
        super().remove(gone)

    def _join(self, group: PromptGroup) -> bool:
        self._joined, self._known = True, False
        early = super()._join(group)
        self._set_slack([*self._slack, *[0] * len(group.rows)])
        return early

    def _filter(self, gone: set[Row]) -> None:
        slack = [each for each, row in zip(self._slack, self._decoding_rows, strict=True) if row not in gone]
        super()._filter(gone)
        self._set_slack(slack)

    def _set_slack(self, slack: list[int]) -> None:
        """After rows have come or gone."""
        nothing = [0] * len(slack)
        self._slack = take_back(self._cache[:-1], nothing, slack) if any(self._slack) and slack else nothing

    def _decode(self) -> list[tuple[Row, int]]:
        rows = self._decoding_rows
        alone = not (self._groups or self._unfed or self._joined)
        hurried = not alone and any(row.spec.sequence_class == "interactive" for row in self._prefilling)
        self._drafting.begin(len(rows), alone=alone, hurried=hurried)
        self._joined = False
        known, self._known = self._known, False
        if not self._drafting.tries(rows, known=known):
            return self._decode_plainly()
        began = time.perf_counter()
        inputs = cast(list[int], self._next_B.tolist())
        self._drafting.waited(time.perf_counter() - began)
        drafts = self._drafting.drafts(rows, inputs, together=self._move_together)
        if not any(drafts):
            return self._decode_plainly()
        parts = [_Part(*each) for each in zip(rows, inputs, drafts, strict=True)]
        if self._move_together and not shorten(parts):
            self._drafting.checks_nothing()
            return self._decode_plainly()
        return self._check(parts)

    def _news(self, tokens: list[tuple[Row, int]]) -> list[tuple[Row, int]]:
        self._drafting.told(len(tokens))
        return super()._news(tokens)

    def _check(self, parts: Sequence[_Part]) -> list[tuple[Row, int]]:
        """Feed inputs and drafts; tell the inputs, what holds of the drafts, and what was drawn behind that."""
        *caches, tag = self._cache
        self._cache = [*ragged(caches), tag]
        before = states(caches)
        ids_BL, is_fed_BL = padded([part.ids for part in parts])
        logits_BLV = self._fed(ids_BL, is_fed_BL)
        inputs = self._accept(parts, ids_BL, is_fed_BL, logits_BLV)
        width = logits_BLV.shape[1]
        if before and any(part.accepted + 1 < len(part.ids) for part in parts):
            self._take_back([width] * len(parts))
            go_back(self._cache[:-1], before)
            read = [part.ids[: part.accepted + 1] for part in parts]
            again = self._fed(*padded(read)).shape[1]
            self._take_back([again - len(ids) for ids in read])
            mx.eval([cache.state for cache in self._cache])  # this step's time, and not the next one's
        else:
            self._take_back([width - 1 - part.accepted for part in parts])
        self._next_B = mx.array(inputs, mx.uint32)
        self._drafting.checked(width, [(part.row, len(part.ids) - 1, part.accepted) for part in parts])
        untold, self._untold = self._untold, {part.row for part in parts}
        self.unfed, self._known = 1, True
        return self._news(
            [
                (part.row, id_)
                for part, input_ in zip(parts, inputs, strict=True)
                for id_ in (*part.told(part.row in untold), input_)
            ]
        )

    def _fed(self, ids_BL: Ids, is_fed_BL: Flags) -> mx.array:
        """Feed each row its ids, without the padding: logits [B, L, V]."""
        caches, is_padded = self._cache[:-1], not is_fed_BL.all()
        if is_padded:
            expect(caches, is_fed_BL.sum(axis=1).tolist())
        logits_BLV = self._model(mx.array(ids_BL), cache=self._cache, draws=True)
        if is_padded:
            have_read(caches)
        return logits_BLV

    def _take_back(self, unused: list[int]) -> None:
        """Forget the last so many positions of each row."""
        caches = self._cache[:-1]
        if any(unused):
            self._slack = take_back(caches, unused, self._slack)
        self._plain_steps = 0
        if max(self._slack) > LOOSE and has_windows(caches):
            self._align()

    def _align(self) -> None:
        """Let all rows end together."""
        caches = self._cache[:-1]
        align(caches)
        self._padding = [before + more for before, more in zip(self._padding, self._slack, strict=True)]
        if min(self._padding):  # which all rows share: rows that are fast by turns would pile it up
            self._padding = keep_rows(caches, list(range(len(self._padding))), self._padding)
        self._slack = [0] * len(self._slack)

    def _decode_plainly(self) -> list[tuple[Row, int]]:
        """A step without drafts; after some, rows end together again: the sooner the shorter they are."""
        self._plain_steps += 1
        if any(self._slack) and self._plain_steps > (end_of(self._cache[:-1]) or LOOSE) // ALIGN_SHARE:
            self._align()
        return super()._decode()

    def _accept(self, parts: Sequence[_Part], ids_BL: Ids, is_fed_BL: Flags, logits_BLV: mx.array) -> list[int]:
        """Draw at every place, and let each row move on as far as its draft holds; the inputs after that."""
        index_N, steps_N = is_fed_BL.nonzero()
        logits_NV = logits_BLV.reshape(-1, logits_BLV.shape[2])
        if len(index_N) < is_fed_BL.size:
            logits_NV = logits_NV[mx.array(np.flatnonzero(is_fed_BL).astype(np.int32))]
        tokens_N, draw = self._sampler.ahead(
            Places(index_N, steps_N, lambda: tuple(row for part in parts for row in part.ahead())),
            logits_NV,
            mx.array(ids_BL[is_fed_BL]),
        )
        drawn, start = cast(list[int], tokens_N.tolist()), 0
        each: list[tuple[_Part, int, int]] = []
        for part in parts:
            each.append((part, start, part.held(drawn, start)))
            start += len(part.ids)
        least = min(held for _, _, held in each)
        inputs: list[int] = []
        for part, start, held in each:
            part.accept(least if self._move_together else held)
            end = start + part.accepted
            part.row.draws.extend(zip(repeat(draw), range(start, end + 1), strict=False))
            inputs.append(drawn[end])
        return inputs


def batch_of(
    model: RowModel, config: EngineConfig, pieces: Pieces, keeping: Keeping, drafting: Drafting
) -> RunningBatch | PartedBatch:
    """An empty batch; without drafts its every step brings one token of each row, or of each row of a part."""
    if not drafting.is_on and model.stages > 1:
        parts = [(model.twin(), keeping.twin()) for _ in range(model.stages)]
        return PartedBatch([RunningBatch(each, config, pieces, keeps, draws_late=True) for each, keeps in parts])
    if not drafting.is_on:
        return RunningBatch(model, config, pieces, keeping)
    return SpeculatingBatch(model, config, pieces, keeping, drafting)


def padded(rows: Sequence[Sequence[int]]) -> tuple[Ids, Flags]:
    """Ids of rows [B, L], with 0 behind the shorter ones; and which of them are theirs."""
    lengths_B1 = np.array([len(ids) for ids in rows])[:, None]
    width = int(lengths_B1.max())
    ids_BL = np.array([[*ids, *[0] * (width - len(ids))] for ids in rows], np.int32)
    return ids_BL, np.arange(width) < lengths_B1


def shorten(parts: Sequence[_Part]) -> int:
    """Make all drafts as long as the shortest, which is told."""
    shortest = min(len(part.ids) for part in parts) - 1
    for part in parts:
        part.shorten(shortest)
    return shortest


class _Part:
    """One row's part of a step: what it is fed."""

    def __init__(self, row: Row, token: int, draft: list[int]) -> None:
        self.row = row
        self.accepted = 0
        self._places: list[Place] = []  # in its grammar, if it has one, behind each of the ids
        if row.place is None:
            self.ids = [token, *draft]
        else:
            self.ids = [token]
            self._follow(row.place, draft)

    def _follow(self, place: Place, draft: list[int]) -> None:
        """Draft as much as its grammar allows: nothing else would be drawn."""
        if place.taken < self.row.position:
            place.take(self.ids[0])
        self._places.append(place)
        for id_ in draft:
            after = None if place.is_over else place.after(id_)
            if after is None or after.fault:
                break
            self.ids.append(id_)
            self._places.append(place := after)

    def shorten(self, length: int) -> None:
        """Make its draft no longer than that."""
        del self.ids[length + 1 :], self._places[length + 1 :]

    def ahead(self) -> list[Row]:
        """The row as it is behind each of these ids."""
        row, tokens = self.row, self.row.tokens_behind(self.ids[0])
        written = [[*tokens, *self.ids[1 : step + 1]] if row.depends_on_tokens else [] for step in range(len(self.ids))]
        places: Sequence[Place | None] = self._places or [None] * len(self.ids)
        return [row.ahead(*each, step) for step, each in enumerate(zip(written, places, strict=True))]

    def held(self, drawn: Sequence[int], start: int) -> int:
        """How far its draft says what was drawn behind each id, from `start` on."""
        ids, held, last = self.ids, 0, len(self.ids) - 1
        while held < last and drawn[start + held] == ids[held + 1]:
            held += 1
        if self._places:
            return next((at for at, place in enumerate(self._places[:held]) if place.fault), held)
        return held

    def accept(self, held: int) -> None:
        """Move the row on so far."""
        self.accepted = held
        self.row.position += self.accepted + 1
        if self._places:
            self.row.place = self._places[held]

    def told(self, is_untold: bool) -> list[int]:
        """What is news of it: its input, unless that is the end of a prompt or has been told, and what was accepted."""
        return self.ids[1 if is_untold else 0 : self.accepted + 1]
