"""Waiting for a key that another process writes, with growing pauses."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

SHORTEST_S, LONGEST_S = 0.01, 0.25


class Backoff:
    """Pauses of 10 ms that double up to 250 ms."""

    def __init__(self, shortest_s: float = SHORTEST_S, longest_s: float = LONGEST_S) -> None:
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self.reset()

    def reset(self) -> None:
        """Begin again with the shortest pause."""
        self._next_s = self._shortest_s

    async def pause(self) -> None:
        """Sleep for the next pause."""
        await asyncio.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, self._longest_s)


async def poll(look: Callable[[], Awaitable[T | None]], within_s: float) -> T | None:
    """Call `look` until it returns something, and return that; None after `within_s`. Looks at least once."""
    until, backoff = time.monotonic() + within_s, Backoff()
    while (found := await look()) is None and time.monotonic() < until:
        await backoff.pause()
    return found
