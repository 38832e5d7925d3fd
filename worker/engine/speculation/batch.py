"""A batch whose steps may check drafts: rows with drafts of any length, and rows without, share one forward.

A row is fed its next input and then its draft. At each of these places its token is drawn as it would be without a
draft: from the same logits, with the noise of its seed and of that position, behind the tokens before it. The draft
holds as far as it says what was drawn; the draw after that is the next input. So a draft decides how soon a token
comes, and never which.

Rows are padded to the longest draft. What was fed in vain is taken back from the KV (kv/kinds.py), whose rows may end
at different positions from then on. Recurrent layers cannot forget what they have read: where a draft has not held to
its end, all rows go back to where the step began and read again what holds.

To know what has held before the next step is given out, the device would wait for the host, and the host for the
device. So a step that checks may stay *unread* until the next one is under way (part.py).

Invariants. A step without drafts is `RunningBatch`'s own; when it begins, all steps before it have been read. Of steps
that stay unread, the first one tells what it is fed. Batches with states, windows, grammars or penalties are read at
once.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import cast

import mlx.core as mx
import numpy as np

from mlx_model.config import EngineConfig
from mlx_model.kv.kinds import (
    align,
    end_apart,
    end_of,
    expect,
    go_back,
    has_windows,
    have_read,
    keep_rows,
    ragged,
    share_offsets,
    states,
    take_back,
)
from mlx_model.kv.ragged import Slack
from mlx_model.sampling.draw import Draw
from worker.engine.batch.keeping import Keeping
from worker.engine.batch.parted_batch import PartedBatch
from worker.engine.batch.prompt_group import PromptGroup
from worker.engine.batch.prompts_in_flight import Pieces
from worker.engine.batch.row import Row
from worker.engine.batch.row_model import RowModel
from worker.engine.batch.running_batch import RunningBatch
from worker.engine.batch.sampler import Places
from worker.engine.batch.shared_prompts import SharedPrompts
from worker.engine.speculation.drafting import Drafting
from worker.engine.speculation.lookup import Ids
from worker.engine.speculation.part import (
    Beside,
    Flags,
    Part,
    Unread,
    are_dense,
    cut,
    fed,
    filled,
    held,
    padded,
    positions_of,
)

ALIGN_SHARE = 16  # positions: to align these takes about what it costs in one step to write where each row ends
ROOM_SHARE = 4  # of all positions: more than that a row may not fall behind, either, where rows end apart for long
SHORT = 8  # steps that check drafts and are read at once, after one that stayed unread for nothing
LOOSE = 256  # positions by which a row may fall behind, where a window has to hold them or all rows keep room for them


class SpeculatingBatch(RunningBatch):
    def __init__(
        self,
        model: RowModel,
        config: EngineConfig,
        pieces: Pieces,
        keeping: Keeping,
        shared: SharedPrompts,
        drafting: Drafting,
    ) -> None:
        super().__init__(model, config, pieces, keeping, shared)
        self._drafting = drafting
        self._overlaps = drafting.overlaps
        self._slack: list[int] = []  # positions by which each row ends before the one that ends last
        self._plain_steps = 0  # in a row
        self._joined = False  # rows have, since the step before
        self._known = False  # what the next step is fed: nothing is under way
        self._unread: Unread | None = None  # the step before; `_slack` is of the one before that
        self._was_followed = False  # by another one, or one before it was
        self._at_once = 0  # steps to come that are read at once
        self._beside = Beside.asked_for(config.speculation)
        self._late: list[tuple[Row, int]] = []  # what has been read in the step that runs, and is told in it

    def remove(self, rows: Iterable[Row]) -> None:
        """Free these rows' places and KV, and forget their drafts."""
        gone = list(rows)
        self._drafting.remove(gone)
        super().remove(gone)

    def stop_ahead(self) -> None:
        """Tell what has been drawn, and feed it no more."""
        self._read()
        super().stop_ahead()

    def _join(self, group: PromptGroup) -> bool:
        inputs = zip(group.rows, group.last_ids, strict=True)
        if self._is_early(group) or not all(row.is_plain for row in group.rows):
            self._read()
        self._joined, self._known = True, False
        if not self._cache:  # other texts than those that had no drafts to go on with
            self._at_once = 0
        early = super()._join(group)
        if self._unread is None:
            self._set_slack([*self._slack, *[0] * len(group.rows)])
        else:
            self._unread = self._unread.and_rows(list(inputs))
            end_apart(self._cache[:-1], 0, self._unread.slack)
        return early

    def _filter(self, gone: set[Row]) -> None:
        keep = [at for at, row in enumerate(self._decoding_rows) if row not in gone]
        slack = [self._slack[at] for at in keep if at < len(self._slack)]
        super()._filter(gone)
        self._unread = self._unread.of_rows(keep) if self._unread is not None and keep else None
        if self._unread is None:
            self._set_slack(slack)
        else:
            self._slack = slack
            end_apart(self._cache[:-1], 0, self._unread.slack)

    def _set_slack(self, slack: list[int]) -> None:
        nothing = [0] * len(slack)
        self._slack = take_back(self._cache[:-1], nothing, slack) if any(self._slack) and slack else nothing

    def _decode(self) -> None:
        rows = self._decoding_rows
        alone = not (self._groups or self._unfed or self._joined)
        hurried = not alone and any(row.spec.sequence_class == "interactive" for row in self._prefilling)
        self._drafting.begin(len(rows), alone=alone, hurried=hurried)
        self._joined = False
        if self._late:  # rows have joined
            self._only_read(known=False)
            return
        before = self._unread
        known, self._known = self._known or before is not None, False
        tries = self._drafting.tries(rows, known=known)
        if before is not None:
            most = [*[before.length + 1] * len(before.parts), *[0] * len(before.joined)]
            guesses, length = self._drafting.ahead(rows, most) if tries else ([], 0)
            if length:
                self._check_ahead(guesses, length, before)
                return
            self._read()
            self._at_once = SHORT if tries and not self._was_followed else 0
            self._only_read(known=True)
            return
        if not tries:
            self._decode_plainly()
            return
        began = time.perf_counter()
        inputs = cast(list[int], self._next_B.tolist())
        self._drafting.waited(time.perf_counter() - began)
        drafts = self._drafting.drafts(rows, inputs)
        if not any(drafts):
            self._decode_plainly()
            return
        self._at_once = max(0, self._at_once - 1)
        if (known or not self._drafting.owes) and self._may_be_unread(rows, drafts):
            self._check_unread(rows, inputs, drafts)
            return
        parts = [Part(*each) for each in zip(rows, inputs, drafts, strict=True)]
        self._check(parts)

    def _add_news(self, tokens: list[tuple[Row, int]]) -> None:
        late, self._late = self._late, []
        tokens = [*late, *tokens]
        self._drafting.told(len(tokens))
        super()._add_news(tokens)

    def _check(self, parts: Sequence[Part]) -> None:
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
        self._drafting.checks(width)
        self._drafting.checked(width, [(part.row, len(part.ids) - 1, part.accepted) for part in parts])
        untold, self._untold = self._untold, {part.row for part in parts}
        self.unfed, self._known = 1, True
        self._add_news(news_of(parts, inputs, untold))

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
        caches = self._cache[:-1]
        if any(unused):
            self._slack = take_back(caches, unused, self._slack)
        self._plain_steps = 0
        if max(self._slack) > LOOSE and has_windows(caches):
            self._align()

    def _align(self) -> None:
        caches = self._cache[:-1]
        align(caches)
        self._padding = [before + more for before, more in zip(self._padding, self._slack, strict=True)]
        if min(self._padding):  # which all rows share: rows that are fast by turns would pile it up
            self._padding = keep_rows(caches, list(range(len(self._padding))), self._padding)
        self._slack = [0] * len(self._slack)

    def _decode_plainly(self) -> None:
        """A step without drafts; after some, rows end together again: the sooner the shorter they are.

        Where KV is written in place it costs nothing that rows end apart, but for room that one far behind keeps.
        """
        self._plain_steps += 1
        if any(self._slack) and self._plain_steps > (end := end_of(self._cache[:-1]) or LOOSE) // ALIGN_SHARE:
            may_be = min(LOOSE, end // ROOM_SHARE) if self._model.draws_in_place(self._cache) else 0
            if max(self._slack) > may_be:
                self._align()
        super()._decode()

    def _accept(self, parts: Sequence[Part], ids_BL: Ids, is_fed_BL: Flags, logits_BLV: mx.array) -> list[int]:
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
        return self._hold(parts, tokens_N, draw, [0, *accumulate(len(part.ids) for part in parts)][:-1])

    def _hold(self, parts: Sequence[Part], tokens_N: mx.array, draw: Draw, starts: Sequence[int]) -> list[int]:
        """Read what was drawn, and let each row move on so far; the inputs after that. `starts`: rows' first places."""
        drawn = cast(list[int], tokens_N.tolist())
        holds = [part.held(drawn, start) for part, start in zip(parts, starts, strict=True)]
        for part, start, count in zip(parts, starts, holds, strict=True):
            part.accept(count, draw, start)
        return [drawn[start + count] for start, count in zip(starts, holds, strict=True)]

    # -- steps that stay unread

    def _may_be_unread(self, rows: tuple[Row, ...], drafts: list[list[int]]) -> bool:
        """True if what such drafts bring may be read in the next step."""
        return (
            self._overlaps
            and not self._at_once
            and are_dense(drafts, max(map(len, drafts)))
            and self._sampler.are_plain(rows)
        )

    def _check_unread(self, rows: tuple[Row, ...], inputs: list[int], drafts: list[list[int]]) -> None:
        """Feed inputs and drafts, all of them as long as the longest; tell the inputs."""
        length = max(map(len, drafts))
        self._cache = [*ragged(self._cache[:-1]), self._cache[-1]]
        draft_BK = mx.array([filled(draft, length) for draft in drafts], mx.uint32)
        positions_BL = positions_of(rows)[:, None] + mx.arange(1 + length, dtype=mx.uint64)
        self._unread = self._made(draft_BK, positions_BL, Slack.of(self._slack))
        self._unread.give_out(self._next_B)
        self._unread.parts = [Part(*each) for each in zip(rows, inputs, drafts, strict=True)]
        self._was_followed = False
        self._drafting.checks(1 + length, "begins")
        untold, self._untold = self._untold, set(rows)
        self._told(rows, inputs, untold)

    def _check_ahead(self, guesses: list[list[int]], length: int, before: Unread) -> None:
        """Feed what the step before draws and drafts behind it; and read that step, and tell what it has brought."""
        draft_BK, positions_BL = cut(guesses, length, before)
        unread = self._made(draft_BK, positions_BL, before.slack, whole=self._beside is not None)
        if self._beside is None:
            unread.give_out(self._next_B)
            least = self._tell_of(before, unread, guesses)
        else:
            next_B = self._next_B
            least = self._beside(lambda: unread.give_out(next_B), lambda: self._tell_of(before, unread, guesses))
        unread.slack = unread.slack.less(least)
        end_apart(self._cache[:-1], least, unread.slack)
        self._unread, self._was_followed = unread, True

    def _tell_of(self, before: Unread, unread: Unread, guesses: list[list[int]]) -> int:
        """Read the step before and tell of it, now that one which feeds these is under way; how much sooner all end."""
        length = unread.length
        inputs, least = self._moved_on(before)
        behind = [(part.row, input_, part.accepted + 1) for part, input_ in zip(before.parts, inputs, strict=True)]
        behind += [(row, input_, 0) for row, input_ in before.joined]
        unread.parts = [
            Part(row, input_, guess[at : at + length]) for (row, input_, at), guess in zip(behind, guesses, strict=True)
        ]
        self._drafting.checks(1 + length, "follows")
        self._add_news([])
        if self._beside is not None:
            self._drafting.foresee([part.row for part in unread.parts], 1 + length)
        return least

    def _made(self, draft_BK: mx.array, positions_BL: mx.array, slack: Slack, *, whole: bool = False) -> Unread:
        """Feed inputs and drafts, and draw behind each id, at these positions: nearly all, or the `whole`, is to be
        given out. The parts are its caller's to say."""
        caches, length = self._cache[:-1], draft_BK.shape[1]
        ids_BL = fed(self._next_B, draft_BK)
        logits_BLV = self._model(ids_BL, cache=self._cache, draws=True, whole=whole)
        logits_NV = logits_BLV.reshape(-1, logits_BLV.shape[2])
        tokens_N, draw = self._sampler.unread(positions_BL, logits_NV, ids_BL.reshape(-1))
        held_B, self._next_B = held(tokens_N.reshape(ids_BL.shape), draft_BK)
        unused_B = length - held_B
        slack = slack.more(unused_B)
        share_offsets(caches, unused_B)
        end_apart(caches, 0, slack)
        self._plain_steps = self.unfed = 0
        starts = list(range(0, ids_BL.size, 1 + length))
        return Unread([], length, tokens_N, draw, held_B, slack, starts, positions_BL[:, 0])

    def _only_read(self, *, known: bool) -> None:
        """A step that tells what the one before has brought, and feeds nothing: rows may have ended by it."""
        self._drafting.only_reads()
        self.unfed, self._known, self.has_decoded = 1, known, False
        self._add_news([])

    def _read(self) -> None:
        """Read the step before, if it has not been: what the next one is fed is known then."""
        before, self._unread = self._unread, None
        if before is None:
            return
        _, least = self._moved_on(before)
        end_apart(self._cache[:-1], least, Slack.of(self._slack) if any(self._slack) else None)

    def _moved_on(self, before: Unread) -> tuple[list[int], int]:
        """Read a step: what its rows are fed next, and positions by which all end sooner than was counted."""
        parts = before.parts
        inputs = self._hold(parts, before.tokens_N, before.draw, before.starts)
        self._late += news_of(parts, inputs, self._untold)
        self._drafting.checked(1 + before.length, [(part.row, len(part.ids) - 1, part.accepted) for part in parts])
        slack = [was + before.length - part.accepted for was, part in zip(self._slack, parts, strict=True)]
        slack += [0] * len(before.joined)
        least = min(slack)
        self._slack = [each - least for each in slack]
        return inputs, least


def news_of(parts: Sequence[Part], inputs: Sequence[int], untold: Collection[Row]) -> list[tuple[Row, int]]:
    """Tokens that have held of these, and what was drawn behind them."""
    return [
        (part.row, id_)
        for part, input_ in zip(parts, inputs, strict=True)
        for id_ in (*part.told(part.row in untold), input_)
    ]


def batch_of(
    model: RowModel,
    config: EngineConfig,
    pieces: Pieces,
    keeping: Keeping,
    shared: SharedPrompts,
    drafting: Drafting,
) -> RunningBatch | PartedBatch:
    """An empty batch; without drafts its every step brings one token of each row, or of each row of a part."""
    if not drafting.is_on and model.stages > 1:
        parts = [(model.twin(), keeping.twin()) for _ in range(model.stages)]
        none = SharedPrompts("off")
        return PartedBatch([RunningBatch(each, config, pieces, keeps, none, draws_late=True) for each, keeps in parts])
    if not drafting.is_on:
        return RunningBatch(model, config, pieces, keeping, shared)
    return SpeculatingBatch(model, config, pieces, keeping, shared, drafting)
