"""A step that checks drafts: each row's part of it, on the host, and the whole while it is unread, on the device.

A step that stays unread is read while the next one is given out. How far its rows have gone on is not known then: by
what was drawn behind the last id that holds, so by one id at least and by all of their drafts and one more at most. The
ids that a row may go on with from the last one on that the host knows are given to the device, and the next draft is
cut out of them there: behind as many ids as the row has gone on by. It does not matter if these are the ids that the
text says: where a row differs, it is taken to go on along the text.

On CUDA a check of 28 layers takes the host 2 ms to give out, in which MLX has let go of the interpreter. Meanwhile
another thread reads the step before, tells what it has brought, and looks for the next drafts.

The device counts positions, too: those that are drawn for, of which noise is made (sampling/draw.py), and by how many
rows end before one another (kv/ragged.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_model.config import SpeculationConfig
from mlx_model.device import on_cuda
from mlx_model.kv.ragged import Slack
from mlx_model.sampling.draw import Draw
from worker.engine.batch.grammars import Place
from worker.engine.batch.row import Row
from worker.engine.speculation.lookup import Ids

NOT_FED = -1  # ids that hold of a row that a step was not given out for: it stands where it stood
_NO_ID = 0xFFFFFFFF  # in the place of a draft's id: nothing that is drawn

T = TypeVar("T")
Flags = npt.NDArray[np.bool_]


def padded(rows: Sequence[Sequence[int]]) -> tuple[Ids, Flags]:
    """Ids of rows [B, L], with 0 behind the shorter ones; and which of them are theirs."""
    lengths_B1 = np.array([len(ids) for ids in rows])[:, None]
    width = int(lengths_B1.max())
    ids_BL = np.array([[*ids, *[0] * (width - len(ids))] for ids in rows], np.int32)
    return ids_BL, np.arange(width) < lengths_B1


def are_dense(drafts: Sequence[list[int]], longest: int) -> bool:
    """True if at least half of the places are used, where each row is given so many."""
    return 2 * sum(min(longest, len(draft)) for draft in drafts) >= longest * len(drafts)


class Part:
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

    def accept(self, held: int, draw: Draw, start: int) -> None:
        """Move the row on so far; `start`: the first place of the row in that draw."""
        self.accepted = held
        self.row.draws.extend(zip(repeat(draw), range(start, start + held + 1), strict=False))
        self.row.position += self.accepted + 1
        if self._places:
            self.row.place = self._places[held]

    def told(self, is_untold: bool) -> list[int]:
        """News of the row: its input, unless that is the end of a prompt or has been told, and what was accepted."""
        return self.ids[1 if is_untold else 0 : self.accepted + 1]


class Beside:
    """A thread for what is done while this one gives operations out."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "beside")

    @classmethod
    def asked_for(cls, config: SpeculationConfig | None) -> Beside | None:
        """None: all is done in one thread."""
        asked = False if config is None else config.reads_beside
        return cls() if (on_cuda() if asked is None else asked) else None

    def __call__(self, give: Callable[[], None], do: Callable[[], T]) -> T:
        """Result of `do`, which reads arrays that have been given out before and makes none: streams are threads'."""
        done = self._thread.submit(do)
        try:
            give()
        finally:
            wait([done])
        return done.result()


@dataclass
class Unread:
    """The rows of such a step that are left in the batch. N: places of all rows that it was given out for, in order."""

    parts: list[Part]
    length: int  # of each row's draft
    tokens_N: mx.array  # drawn behind each id
    draw: Draw
    held_B: mx.array  # ids of each draft
    slack: Slack  # after what has not held is taken back
    starts: list[int]  # each row's first place
    positions_B: mx.array  # at which each row's first place is drawn, uint64
    joined: list[tuple[Row, int]] = field(default_factory=list)  # rows that it was not given out for, and their inputs

    def give_out(self, next_B: mx.array) -> None:
        """Let it be computed, and what its rows are fed next."""
        # Positions, too, though nobody may ask for them: else each step would hold on to the one before it.
        known = self.tokens_N, self.held_B, next_B, self.slack.before_B, self.positions_B
        mx.async_eval(*known, *self.draw.arrays)  # type: ignore[no-untyped-call]

    def of_rows(self, keep: Sequence[int]) -> Unread:
        count, index = len(self.parts), mx.array(list(keep))
        kept = [at for at in keep if at < count]
        return replace(
            self,
            parts=[self.parts[at] for at in kept],
            starts=[self.starts[at] for at in kept],
            held_B=self.held_B[index],
            positions_B=self.positions_B[index],
            slack=self.slack.of_rows(keep),
            joined=[self.joined[at - count] for at in keep if at >= count],
        )

    def and_rows(self, joined: Sequence[tuple[Row, int]]) -> Unread:
        behind_B = mx.full(len(joined), NOT_FED, mx.int32)
        return replace(
            self,
            held_B=mx.concatenate([self.held_B, behind_B]),
            positions_B=mx.concatenate([self.positions_B, positions_of([row for row, _ in joined])]),
            slack=self.slack.and_rows(len(joined)),
            joined=[*self.joined, *joined],
        )


def positions_of(rows: Sequence[Row]) -> mx.array:
    return mx.array([row.position for row in rows], mx.uint64)


def filled(ids: list[int], length: int) -> list[int]:
    """So many ids, some of which are none."""
    return [*ids[:length], *[_NO_ID] * (length - len(ids))]


def fed(next_B: mx.array, draft_BK: mx.array) -> mx.array:
    """Inputs and drafts [B, K + 1]; 0 where a draft has no id."""
    return mx.concatenate([next_B[:, None], mx.where(draft_BK == _NO_ID, mx.array(0, mx.uint32), draft_BK)], axis=1)


def held(tokens_BL: mx.array, draft_BK: mx.array) -> tuple[mx.array, mx.array]:
    """How many ids of each draft were drawn [B], and what was drawn behind them [B]; L = K + 1."""
    end_B1 = mx.full((draft_BK.shape[0], 1), _NO_ID, mx.uint32)
    held_B1 = mx.argmin(tokens_BL == mx.concatenate([draft_BK, end_B1], axis=1), axis=1, keepdims=True)
    return held_B1[:, 0].astype(mx.int32), mx.take_along_axis(tokens_BL, held_B1, axis=1)[:, 0]


def cut(guesses: Sequence[list[int]], length: int, before: Unread) -> tuple[mx.array, mx.array]:
    """Drafts [B, K] of so many ids, and the positions of the next draws, uint64 [B, K + 1].

    `guesses`: what each row may go on with behind what it was fed first in the step before.
    """
    width = before.length + 1 + length
    guesses_BM = mx.array([filled(ids, width) for ids in guesses], mx.uint32)
    steps_BL = before.held_B[:, None] + mx.arange(1, length + 2)
    positions_BL = before.positions_B[:, None] + steps_BL.astype(mx.uint64)
    return mx.take_along_axis(guesses_BM, steps_BL[:, :-1], axis=1), positions_BL
