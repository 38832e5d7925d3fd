"""A child process that does not outlive its parent, however the parent ends.

The parent starts us with `PARALLM_PARENT_PIPE=1` and the read end of a pipe as our stdin. When it dies, the kernel
closes the write end, and we read end-of-file.
"""

import os
import signal
import threading
from collections.abc import Callable

VARIABLE = "PARALLM_PARENT_PIPE"


def follow_parent(on_exit: Callable[[], object] | None = None) -> None:
    """Watch the parent's pipe, if there is one; at its end call `on_exit` (from a thread), by default SIGTERM us."""
    if os.environ.get(VARIABLE) != "1":
        return
    leave = on_exit or _terminate
    threading.Thread(target=_watch, args=(leave,), name="lifeline", daemon=True).start()


def _watch(leave: Callable[[], object]) -> None:
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass  # a closed stdin is the end of the parent, too
    leave()


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
