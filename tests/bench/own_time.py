"""A clock for an engine that takes turns with others in one process."""

from __future__ import annotations

import time
from collections.abc import Callable


class OwnTime:
    """Stands still while another engine computes, as a worker's clock would: it has one engine."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._before = 0.0
        self._began = clock()

    def __call__(self) -> float:
        return self._before + self._clock() - self._began

    def stop(self) -> None:
        """The engine's turn is over."""
        self._before = self()

    def go_on(self) -> None:
        """Its next turn begins."""
        self._began = self._clock()
