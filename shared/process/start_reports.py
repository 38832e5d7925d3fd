"""A starting process reports to the one that has started it: how far it is, that it is ready, or why it cannot be.

Lines of JSON through a pipe, whose number the parent passes in the environment; without one nothing is said. A parent
that has gone is no trouble: its child learns of that elsewhere (lifeline.py).
"""

import contextlib
import os

import msgspec

VARIABLE = "PARALLM_START_REPORTS"  # the number of a descriptor


class StartReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line: of `worker` and `why` at most one is there, and then it is the last line."""

    progress: float = 0.0  # of reading weights, 0 to 1
    worker: str = ""  # id of a worker that is ready
    why: str = ""  # it cannot start, for people


def report(*, progress: float = 0.0, worker: str = "", why: str = "") -> None:
    """Say something to the parent, if it listens."""
    write(msgspec.json.encode(StartReport(round(progress, 3), worker, why)))


def write(message: bytes) -> None:
    """Write a message of one line to the parent, if it listens."""
    number, line = os.environ.get(VARIABLE, ""), message + b"\n"
    with contextlib.suppress(OSError):
        while number.isdigit() and line:
            line = line[os.write(int(number), line) :]
