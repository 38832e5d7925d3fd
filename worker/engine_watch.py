"""Watches that a worker is alive in fact: its engine thread from the event loop, and the loop from outside Python.

A turn of the engine's loop may be long (a kernel is compiled, a long prompt is fed), so silence counts only while
there is work, and only beyond a generous limit. From half of it on the worker no longer calls itself ready; at the
limit it gives its leases back and ends, and its supervisor starts it again. Where the system says how long a thread
that could run had no processor (Linux), that is no silence: a busy machine's worker would begin anew for ever.

Invariants. An idle engine is never silent. A thread that has ended without a stop counts as silent for ever.
"""

import asyncio
import contextlib
import faulthandler
import math
import threading
from collections.abc import Callable
from pathlib import Path

from worker.engine.thread import EngineThread

LOOK_S = 1.0


class EngineWatch:
    """Looks at one engine thread every second or more often; `on_stall` is called once, with a reason."""

    def __init__(
        self,
        engine: EngineThread,
        limit_s: float,
        on_stall: Callable[[str], None],
        delays: Callable[[], dict[str, float]] = lambda: processor_delays(),
    ) -> None:
        self._engine, self._delays = engine, delays
        self._limit_s = limit_s
        self._on_stall = on_stall

    @property
    def silent_s(self) -> float:
        """How long the engine has been silent over its work, seconds; infinite when its thread has ended."""
        return self._engine.silent_s() if self._engine.alive else math.inf

    @property
    def suspects(self) -> bool:
        """True if the worker should no longer be relied on."""
        return self.silent_s > self._limit_s / 2

    async def run(self) -> None:
        """Look until the engine is found stuck or dead."""
        silent, before, delays = 0.0, 0.0, self._delays()
        while silent <= self._limit_s:
            await asyncio.sleep(min(LOOK_S, self._limit_s / 8))
            silent, now = self.silent_s, self._delays()
            if silent < before or not silent:  # another turn
                delays = now
            before = silent
            if silent < math.inf:
                silent -= max((delay - delays.get(thread, 0.0) for thread, delay in now.items()), default=0.0)
        if silent == math.inf:
            self._on_stall("the engine's thread has ended")
        else:
            self._on_stall(f"the engine has been silent for {silent:.1f} s over its work")


def processor_delays() -> dict[str, float]:
    """Seconds that each other thread of this process could have run and had no processor, by thread; {}: not known."""
    delays = {}
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
            delays[thread.parent.name] = int(thread.read_bytes().split()[1]) / 1e9
    delays.pop(str(threading.get_native_id()), None)  # the event loop's, which does not compute
    return delays


async def guard_loop(limit_s: float) -> None:
    """End this process, with every thread's stack on stderr, when the event loop stands still for `limit_s`.

    For native code that never gives the interpreter back: then nothing in Python can look, so a thread of the C
    library does. Its dump shows functions and lines, no values.
    """
    try:
        while True:
            faulthandler.dump_traceback_later(limit_s, exit=True)
            await asyncio.sleep(min(LOOK_S, limit_s / 8))
    finally:
        faulthandler.cancel_dump_traceback_later()
