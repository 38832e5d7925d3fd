"""A person's signals: the first one ends the run in order, the second one ends it whatever hangs."""

import asyncio
import faulthandler
import itertools
import signal
from collections.abc import Callable
from types import FrameType

LEAVE_S = 10.0  # after the second signal, to let go of the ring in order


def obey(stop: Callable[[], None], stopping: Callable[[], bool], end: Callable[[], object]) -> None:
    """From now on SIGTERM and SIGINT call `stop`; while it is `stopping` they call `end`, and LEAVE_S later all ends.

    The handlers are the interpreter's and not the event loop's, and the last resort needs neither: it writes to
    standard error where each thread hangs, and ends the process.
    """
    loop = asyncio.get_running_loop()
    signals_before = itertools.count()  # `next` is one step: the second signal may come while the first is handled

    def asked(number: int, frame: FrameType | None) -> None:
        if next(signals_before) or stopping():
            faulthandler.dump_traceback_later(LEAVE_S, exit=True)
            loop.call_soon_threadsafe(end)
        else:
            loop.call_soon_threadsafe(stop)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, asked)


def ended() -> None:
    """The run has ended by itself."""
    faulthandler.cancel_dump_traceback_later()
