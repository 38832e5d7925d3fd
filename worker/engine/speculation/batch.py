"""A batch whose steps may check drafts: rows with drafts of any length, and rows without, share one forward.

A row is fed its next input and then its draft. At each of these places its token is drawn as it would be without a
draft: from the same logits, with the noise of its seed and of that position, behind the tokens before it. The draft
holds as far as it says what was drawn; the draw after that is the next input. So a draft decides how soon a token
comes, and never which.

Rows are padded to the longest draft. What was fed in vain is taken back from the KV (kv/kinds.py), which ends at one
position for all rows again. A model with layers that cannot forget their latest positions gets no drafts.

Invariants. Before a step that checks, the host knows what it feeds; a step without drafts is `RunningBatch`'s own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import cast

import mlx.core as mx

from worker.engine.batch.keeping import Keeping
from worker.engine.batch.prompt_group import PromptGroup
from worker.engine.batch.prompts_in_flight import Pieces
from worker.engine.batch.row import Row
from worker.engine.batch.row_model import RowModel
from worker.engine.batch.running_batch import RunningBatch
from worker.engine.kv.kinds import take_back
from worker.engine.messages import EngineConfig
from worker.engine.speculation.drafting import Drafting


class SpeculatingBatch(RunningBatch):
    """The rows that prefill and decode together."""

    def __init__(
        self, model: RowModel, config: EngineConfig, pieces: Pieces, keeping: Keeping, drafting: Drafting
    ) -> None:
        super().__init__(model, config, pieces, keeping)
        self._drafting = drafting
        self._joined = False  # rows have, since the step before
        self._known = False  # what the next step is fed: nothing is under way

    def remove(self, rows: Iterable[Row]) -> None:
        """Free these rows' places and KV, and forget their drafts."""
        gone = list(rows)
        self._drafting.remove(gone)
        super().remove(gone)

    def _join(self, group: PromptGroup) -> bool:
        self._joined, self._known = True, False
        return super()._join(group)

    def _decode(self) -> list[tuple[Row, int]]:
        rows = self._decoding_rows
        self._drafting.begin(len(rows), alone=not (self._groups or self._unfed or self._joined))
        self._joined = False
        known, self._known = self._known, False
        if not self._drafting.tries(rows, known=known):
            return super()._decode()
        began = time.perf_counter()
        inputs = cast(list[int], self._next_B.tolist())
        self._drafting.waited(time.perf_counter() - began)
        drafts = self._drafting.drafts(rows, inputs)
        if not any(drafts):
            return super()._decode()
        return self._check([_Part(*each) for each in zip(rows, inputs, drafts, strict=True)])

    def _check(self, parts: Sequence[_Part]) -> list[tuple[Row, int]]:
        """Feed inputs and drafts; tell the inputs, and what holds of the drafts."""
        width = max(len(part.ids) for part in parts)
        logits_BLV = self._model(
            mx.array([part.ids + [0] * (width - len(part.ids)) for part in parts]), cache=self._cache
        )
        self._next_B = mx.array(self._accept(parts, logits_BLV), mx.uint32)
        unused = [width - 1 - part.accepted for part in parts]
        if any(unused):
            self._padding = take_back(self._cache[:-1], unused, self._padding)
        self._drafting.checked(width, [(part.row, len(part.ids) - 1, part.accepted) for part in parts])
        self.unfed, self._known = 0, True
        untold, self._untold = self._untold, set()
        told = [(part.row, id_) for part in parts for id_ in part.told(part.row in untold)]
        return self._told([row for row, _ in told], [id_ for _, id_ in told], set())

    def _accept(self, parts: Sequence[_Part], logits_BLV: mx.array) -> list[int]:
        """Draw at every place, and let each row move on as far as its draft holds; the inputs after that."""
        places = [(at, step) for at, part in enumerate(parts) for step in range(len(part.ids))]
        index = mx.array(places)
        tokens_N, draw = self._sampler.ahead(
            tuple(row for part in parts for row in part.ahead),
            logits_BLV[index[:, 0], index[:, 1]],
            mx.array([id_ for part in parts for id_ in part.ids])[:, None],
            tuple(self._model.versions[at] for at, _ in places),
        )
        drawn = cast(list[int], tokens_N.tolist())
        inputs: list[int] = []
        start = 0
        for part in parts:
            end = start + len(part.ids)
            part.accept(drawn[start:end])
            part.row.draws.extend((draw, start + step) for step in range(part.accepted + 1))
            inputs.append(drawn[start + part.accepted])
            start = end
        return inputs


def batch_of(
    model: RowModel, config: EngineConfig, pieces: Pieces, keeping: Keeping, drafting: Drafting
) -> RunningBatch:
    """An empty batch; without drafts its every step brings one token of each row."""
    if not drafting.is_on:
        return RunningBatch(model, config, pieces, keeping)
    return SpeculatingBatch(model, config, pieces, keeping, drafting)


class _Part:
    """One row's part of a step: what it is fed, and the row as it is behind each of these ids."""

    def __init__(self, row: Row, token: int, draft: Sequence[int]) -> None:
        self.row = row
        self.ids = [token]
        self.accepted = 0
        tokens = row.tokens_behind(token)
        place = row.place
        if place is not None and place.taken < row.position:
            place.take(token)
        self.ahead = [row.ahead(tokens, place, 0)]
        for id_ in draft:
            if place is not None:
                place = None if place.is_over else place.after(id_)
                if place is None or place.fault:
                    break  # the grammar does not allow it, so it would not be drawn
            tokens = [*tokens, id_] if tokens or row.depends_on_tokens else []
            self.ids.append(id_)
            self.ahead.append(row.ahead(tokens, place, len(self.ahead)))

    def accept(self, drawn: Sequence[int]) -> None:
        """Move the row on, as far as its draft says what was drawn behind each id."""
        for at, (id_, ahead) in enumerate(zip(self.ids[1:], self.ahead, strict=False)):
            if drawn[at] != id_ or (ahead.place is not None and ahead.place.fault):
                break
            self.accepted += 1
        self.row.position += self.accepted + 1
        self.row.place = self.ahead[self.accepted].place

    def told(self, is_untold: bool) -> list[int]:
        """What is news of it: its input, unless that is the end of a prompt or has been told, and what was accepted."""
        return self.ids[1 if is_untold else 0 : self.accepted + 1]
