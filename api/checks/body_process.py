"""`python -m api.checks.body_process SECONDS`: reads long bodies for an api process, which may kill it.

A question is a `ReaderCall`, and with its first one the body in a message of its own. An answer is a `ReaderOutcome`
and what the function has returned. A call that takes more than so many seconds of computing ends the process by
SIGPROF.
"""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable

import msgspec

from shared.errors import ParallmError
from shared.process.call_pipe import CallPipe
from shared.process.garbage import leave_out_what_is_loaded


class ReaderCall(msgspec.Struct, array_like=True):
    """A function of ours, `module:name`, which gets the body and the context."""

    function: str
    context: bytes
    has_body: bool  # the next message is the body; else it is that of the call before


class ReaderOutcome(msgspec.Struct, array_like=True):
    """Empty when the function has returned; else the error that it has raised."""

    error: str = ""  # the name of its class in shared/errors.py
    message: str = ""
    param: str | None = None


_call = msgspec.msgpack.Decoder(ReaderCall)


def main() -> None:
    """Answers questions until stdin is closed."""
    computing_s = float(sys.argv[1])
    os.nice(5)  # tokens go first
    pipe, body = CallPipe(), b""
    leave_out_what_is_loaded()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        while (message := pipe.read()) is not None:
            call = _call.decode(message)
            if call.has_body:
                body = pipe.read() or b""
            module, _, name = call.function.partition(":")
            reader: Callable[[bytes, bytes], bytes] = getattr(importlib.import_module(module), name)
            signal.setitimer(signal.ITIMER_PROF, computing_s)
            outcome, result = ReaderOutcome(), b""
            try:
                result = reader(body, call.context)
            except ParallmError as error:
                outcome = ReaderOutcome(type(error).__name__, error.message, error.param)
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.write(msgspec.msgpack.encode(outcome))
            pipe.write(result)


if __name__ == "__main__":
    main()
