"""Numbers that rows draw with, in arrays: seeds, temperatures, filters.

Most rows ask for nothing else. Such rows are *plain*: their draw depends on the logits, a seed and a position only, so
a step that draws for many places of each repeats their numbers and asks no row again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from shared.noise import mix_seeds
from shared.sequences import LEAST_TEMPERATURE
from worker.engine.batch.row import Row

Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Numbers:
    """Sampling numbers of rows, or of places in rows, as arrays."""

    def __init__(self, seeds: npt.NDArray[np.uint64], top_k: Indices, floats: Sequence[Floats]) -> None:
        """`seeds`: mixed. `floats`: temperature, top_p, min_p."""
        self.seeds, self.top_k = seeds, top_k
        self.temperature, self.top_p, self.min_p = floats

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Numbers:
        """Collects the numbers of these rows."""
        each = [row.sampling for row in rows]
        floats = np.array([(s.temperature, s.top_p, s.min_p) for s in each], np.float64).reshape(-1, 3)
        return cls(mix_seeds([s.seed for s in each]), np.array([s.top_k for s in each], np.int64), list(floats.T))

    def __len__(self) -> int:
        return len(self.seeds)

    def at(self, index: Indices) -> Numbers:
        """Those of some rows, maybe more than once."""
        floats = [each[index] for each in (self.temperature, self.top_p, self.min_p)]
        return Numbers(self.seeds[index], self.top_k[index], floats)

    @cached_property
    def seeds_B1(self) -> mx.array:
        """The seeds, on the device."""
        return mx.array(self.seeds)[:, None]

    @property
    def drawn(self) -> list[int]:
        """Indices of the rows that are not greedy."""
        chosen: list[int] = np.flatnonzero(self.temperature >= LEAST_TEMPERATURE).tolist()
        return chosen

    def filtered(self, vocab: int) -> list[int]:
        """Which have top_k or top_p."""
        has_top_k = (self.top_k > 0) & (self.top_k < vocab)
        chosen: list[int] = np.flatnonzero(has_top_k | (self.top_p < 1)).tolist()
        return chosen


class PlainRows:
    """The numbers of a batch whose rows are all plain, cached by the identity of its row tuple."""

    def __init__(self) -> None:
        self._rows: tuple[Row, ...] = ()
        self._numbers: Numbers | None = None

    def numbers(self, rows: tuple[Row, ...]) -> Numbers | None:
        """None: not all of them are plain now."""
        if rows is not self._rows or self._numbers is None:
            self._rows = rows
            self._numbers = Numbers.of(rows) if all(row.is_plain for row in rows) else None
        return self._numbers
