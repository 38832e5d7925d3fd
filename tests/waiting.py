"""Waiting for a condition instead of sleeping."""

import asyncio
import time
from collections.abc import Awaitable, Callable


async def wait_until(condition: Callable[[], Awaitable[bool] | bool], timeout_s: float = 60.0) -> None:
    """Return once the condition holds; AssertionError when it does not within the time."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.01
    while True:
        held = condition()
        if isinstance(held, Awaitable):
            held = await held
        if held:
            return
        assert time.monotonic() < deadline, f"{getattr(condition, '__name__', 'condition')} did not come true"
        await asyncio.sleep(pause_s)
        pause_s = min(0.05, 1.2 * pause_s)  # a look may cost more than what it waits for
