"""Asking again over HTTP: how long to wait before the next try, and for how long in all.

Pauses double from one try to the next, and are never shorter than the server's `Retry-After`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx

BUSY = frozenset({408, 429, 502, 503, 504})  # answers after which the same request may succeed
PAUSE_S = (0.1, 2.0)  # first and longest
LONGEST_ASKED_S = 5.0  # of a `Retry-After`


class Patience:
    """The pauses of one request that is sent until it is answered."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self.pause_s, self._longest_s = PAUSE_S

    @property
    def is_over(self) -> bool:
        """True if the next attempt would start after the deadline."""
        return time.monotonic() + self.pause_s > self._until

    def heed(self, answer: httpx.Response) -> None:
        """Make the next pause at least as long as a busy server asks for."""
        self.pause_s = max(self.pause_s, _retry_after(answer))

    async def pause(self) -> None:
        """Wait until the next try is due."""
        await asyncio.sleep(self.pause_s)
        self.pause_s = min(self._longest_s, 2 * self.pause_s)


async def patiently(
    send: Callable[[], Awaitable[httpx.Response]],
    patience: Patience,
    busy: frozenset[int] = BUSY,
    trouble: Callable[[httpx.Response | httpx.TransportError], None] = lambda trouble: None,
) -> httpx.Response:
    """Send, and repeat while the server is away or busy; `trouble` gets the reason before each pause.

    The answer may be a busy one, and httpx.TransportError is raised, when the patience is over.
    """
    while True:
        outcome: httpx.Response | httpx.TransportError
        try:
            outcome = await send()
        except httpx.TransportError as error:
            if patience.is_over:
                raise
            outcome = error
        else:
            if outcome.status_code not in busy:
                return outcome
            patience.heed(outcome)
            if patience.is_over:
                return outcome
        trouble(outcome)
        await patience.pause()


def _retry_after(answer: httpx.Response) -> float:
    try:
        return min(LONGEST_ASKED_S, float(answer.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0
