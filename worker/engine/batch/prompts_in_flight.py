"""Pieces of prompts that are being computed, and the pace that the times of turns with and without them show."""

import time
from typing import Any

import mlx.core as mx

from worker.engine.scheduler import SMALLEST_PIECE, ChunkSize, PieceSizes

LATELY = 0.2  # weight of the latest piece


class Pieces:
    """Prompt pieces that a turn has begun to feed. Settled before the next, so at most one turn's are under way."""

    def __init__(self, chunk: ChunkSize, area: int | None = None, *, by_ranks: bool = False) -> None:
        """`area`: what rows x width x (past + width) of a forward may be (scheduler.widest); None: anything.

        `by_ranks`: the leading rank measures turns, and `learn` brings the seconds.
        """
        self.pace = PieceSizes()
        self.chunk = chunk
        self.area = area
        self.token_s = 0.0  # that one position has taken lately, including what ran at the same time; 0: not known
        self._states: list[Any] = []
        self._positions = 0
        self._began = 0.0
        self.opened = 0.0  # when the turn began
        self.took_s = 0.0  # by the latest turn that has been settled
        self._by_ranks = by_ranks
        self._unlearnt: int | None = None  # positions of the latest turn, until its seconds are known

    def open(self) -> None:
        """A turn that computes begins."""
        self._began = self.opened = time.perf_counter()

    def begin(self, state: Any, positions: int) -> None:
        """Compute these arrays; waits for nothing."""
        mx.async_eval(state)  # type: ignore[no-untyped-call]
        self._states.append(state)
        self._positions += positions

    def ignore(self) -> None:
        """Learn nothing of this turn: it has other work to do, too."""
        self._began = 0.0

    def drop(self) -> None:
        """Drop the pieces without waiting for them."""
        self._states = []

    def settle(self) -> None:
        """Wait for the turn's pieces."""
        states, positions, began = self._states, self._positions, self._began
        self.forget()
        if states:
            mx.eval(states)
        if began:
            self.took_s = time.perf_counter() - began
            if self._by_ranks:
                self._unlearnt = positions
            else:
                self._learn(positions, self.took_s)

    def learn(self, took_s: float) -> None:
        """Take over the seconds that the latest turn took on the leading rank."""
        if self._unlearnt is not None:
            self._learn(self._unlearnt, took_s)
            self._unlearnt = None

    def _learn(self, positions: int, took_s: float) -> None:
        self.pace.turn(positions, took_s)
        self.chunk.turn(positions, took_s)
        if positions >= SMALLEST_PIECE:
            self.token_s += (took_s / positions - self.token_s) * (LATELY if self.token_s else 1.0)

    def forget(self) -> None:
        """Wait for nothing, and learn nothing: the turn has failed, or is settled."""
        self._states, self._positions, self._began = [], 0, 0.0
