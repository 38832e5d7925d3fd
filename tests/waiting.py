"""Waiting for a condition instead of sleeping."""

import asyncio
import time
from collections.abc import Awaitable, Callable


async def wait_until(condition: Callable[[], Awaitable[bool] | bool], timeout_s: float = 30.0) -> None:
    """Return once the condition holds; AssertionError when it does not within the time."""
    deadline = time.monotonic() + timeout_s
    while True:
        held = condition()
        if isinstance(held, Awaitable):
            held = await held
        if held:
            return
        assert time.monotonic() < deadline, f"{getattr(condition, '__name__', 'condition')} did not come true"
        await asyncio.sleep(0.01)
