"""Positions on three axes (M-RoPE, arXiv 2409.12191): where the ids of a row with images stand.

An image takes as many positions as its longer side has vectors, not as many as it has vectors: each of these stands at
the image's first position, plus its row on the second axis and its column on the third. Text stands at one position on
all axes. So after an image a row's positions are those of its KV less a number that stays (`Spots.shift`), and only
pieces of a prompt with images need all three axes.

Invariants. `Spots` follow from the prompt and its images alone, never from the KV, so KV that is found again (by a
later row, in a file, at a peer) needs nothing else. A `RowPositions` says something for the time of one forward only:
other users of the model, such as a trainer, find positions as of text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from shared.errors import EngineError


class Grid(NamedTuple):
    """An image's vectors, row by row."""

    rows: int
    columns: int


class Spots:
    """The positions of one row's ids."""

    def __init__(self, length: int, places: Sequence[int], grids: Sequence[Grid]) -> None:
        """`length`: of the prompt; `places`: of the ids in it that stand for vectors. EngineError if they are mixed."""
        self._prompt_3P = np.tile(np.arange(length, dtype=np.int32), (3, 1))
        self.shift = 0  # of what comes after the prompt
        seen = 0
        for rows, columns in grids:
            count = rows * columns
            first, last = places[seen], places[seen + count - 1]
            if last - first != count - 1:
                raise EngineError("the placeholders of an image are not in one piece")
            row_T, column_T = np.divmod(np.arange(count, dtype=np.int32), columns)
            self._prompt_3P[:, first : last + 1] = first + self.shift + np.stack([0 * row_T, row_T, column_T])
            self.shift += max(rows, columns) - count
            self._prompt_3P[:, last + 1 :] = np.arange(last + 1, length, dtype=np.int32) + self.shift
            seen += count

    def piece(self, start: int, length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Positions [3, L] of the context from `start` on."""
        inside_3L = self._prompt_3P[:, start : start + length]
        behind = np.arange(start + inside_3L.shape[1], start + length, dtype=np.int32) + self.shift
        return np.concatenate([inside_3L, np.tile(behind, (3, 1))], axis=1)


class RowPositions:
    """Where the rows of the forward stand; of one model. Without anything said, positions are those of the KV."""

    def __init__(self, frequencies_F: mx.array, axes_F: mx.array) -> None:
        """Radians per position, and which axis each of them follows (0: the image's place, 1: rows, 2: columns)."""
        self._frequencies_F, self._axes_F = frequencies_F, axes_F
        self._shift_B: mx.array | None = None  # of each row
        self._moved: tuple[int | mx.array, int | mx.array] = (0, 0)  # where KV ends, and that with the shift
        self.turns: tuple[mx.array, mx.array] | None = None  # cosines and sines [B, 1, L, F] of each id
        self.deep: Sequence[mx.array] = ()  # [B, L, H] that is added after each of the first layers

    @contextmanager
    def moved(self, shift_B: mx.array | None) -> Iterator[None]:
        """Rows of text, or after their images, so far from where their KV says; None: no row is."""
        self._shift_B, self._moved = shift_B, (0, 0 if shift_B is None else shift_B)
        try:
            yield
        finally:
            self._shift_B, self._moved = None, (0, 0)

    @contextmanager
    def spread(self, positions_3BL: mx.array, deep: Sequence[mx.array]) -> Iterator[None]:
        """Use positions on three axes for a forward with images."""
        along_BLF = mx.take(positions_3BL.astype(mx.float32), self._axes_F, axis=0).transpose(1, 2, 0)
        angles_B1LF = (along_BLF * self._frequencies_F)[:, None]
        self.turns, self.deep = (mx.cos(angles_B1LF), mx.sin(angles_B1LF)), deep
        try:
            yield
        finally:
            self.turns, self.deep = None, ()

    def held(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes contexts that restore the present positions when a layer is computed again for its gradients."""
        said = self._shift_B, self._moved, self.turns, self.deep

        @contextmanager
        def again() -> Iterator[None]:
            before = self._shift_B, self._moved, self.turns, self.deep
            self._shift_B, self._moved, self.turns, self.deep = said
            try:
                yield
            finally:
                self._shift_B, self._moved, self.turns, self.deep = before

        return again

    def place(self, offset: int | mx.array) -> int | mx.array:
        """Where rows go on whose KV ends there; computed once for the queries and keys of a layer."""
        if self._shift_B is None:
            return offset
        if offset is not self._moved[0]:
            self._moved = offset, offset + self._shift_B
        return self._moved[1]


class PlacedRope(nn.Module):  # type: ignore[misc]
    """Turns queries and keys as the row positions say; in place of a layer's own `rope`."""

    def __init__(self, row_positions: RowPositions, dims: int, base: float) -> None:
        super().__init__()
        self.row_positions = row_positions
        self.dims = dims
        self.base = base

    def __call__(self, x_BHLD: mx.array, offset: int | mx.array = 0) -> mx.array:
        row_positions = self.row_positions
        if row_positions.turns is None:
            at = row_positions.place(offset)
            return mx.fast.rope(x_BHLD, self.dims, traditional=False, base=self.base, scale=1.0, offset=at)
        cos, sin = row_positions.turns
        left, right = mx.split(x_BHLD.astype(mx.float32), 2, axis=-1)
        turned_BHLD = mx.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
        return turned_BHLD.astype(x_BHLD.dtype)
