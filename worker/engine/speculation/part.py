"""One row's part of a step that checks drafts: what it is fed, and how much of that holds. On the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from mlx_model.sampling.draw import Draw
from worker.engine.batch.grammars import Place
from worker.engine.batch.row import Row
from worker.engine.speculation.lookup import Ids

Flags = npt.NDArray[np.bool_]


def padded(rows: Sequence[Sequence[int]]) -> tuple[Ids, Flags]:
    """Ids of rows [B, L], with 0 behind the shorter ones; and which of them are theirs."""
    lengths_B1 = np.array([len(ids) for ids in rows])[:, None]
    width = int(lengths_B1.max())
    ids_BL = np.array([[*ids, *[0] * (width - len(ids))] for ids in rows], np.int32)
    return ids_BL, np.arange(width) < lengths_B1


def are_dense(drafts: Sequence[list[int]], longest: int) -> bool:
    """Whether at least half of the places are used, where each row is given so many."""
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
        """What is news of it: its input, unless that is the end of a prompt or has been told, and what was accepted."""
        return self.ids[1 if is_untold else 0 : self.accepted + 1]
