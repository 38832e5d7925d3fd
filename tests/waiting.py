"""Waiting for a condition instead of sleeping, and the one limit of time that all tests share.

How long something takes depends on what else the machine does, so no test has a limit of its own. Only a hang must end:
each wait in a test after HANG_S, which then says what did not come, and the test itself a little later, by
pytest-timeout, which reads PYTEST_TIMEOUT. `PYTEST_TIMEOUT=60 pytest ...` shortens both, 0 takes them away.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable

_WHOLE_TEST_S = float(os.environ.setdefault("PYTEST_TIMEOUT", "900"))  # processes that a test starts inherit it
HANG_S = 0.9 * _WHOLE_TEST_S or 86_400.0
NEVER_S = 100 * HANG_S  # of a fallback that must not be what a test waits for

Condition = Callable[[], Awaitable[bool] | bool]


async def wait_until(condition: Condition) -> None:
    """Return once the condition holds; AssertionError when that is a hang."""
    assert await comes_true(condition, HANG_S), f"{getattr(condition, '__name__', 'condition')} did not come true"


async def comes_true(condition: Condition, within_s: float) -> bool:
    """Whether the condition holds within a time: of a chance that a test takes when it comes, and does not need."""
    deadline = time.monotonic() + within_s
    pause_s = 0.01
    while True:
        held = condition()
        if isinstance(held, Awaitable):
            held = await held
        if held or time.monotonic() >= deadline:
            return held
        await asyncio.sleep(pause_s)
        pause_s = min(0.05, 1.2 * pause_s)  # a look may cost more than what it waits for
