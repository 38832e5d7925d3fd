"""Logs are events with fields: `log.info("worker.claimed", job=job_id, slot=3)`.

JSON lines when the output is not a terminal. Fields bound with `structlog.contextvars` (the request id) are on every
line of their task; libraries that use `logging` come out in the same form.
"""

import contextlib
import faulthandler
import logging
import sys
from typing import TextIO, cast

import structlog
from structlog.typing import Processor

# Without locals: they hold prompts and keys.
_tracebacks = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


class _Stderr:
    """Whatever `sys.stderr` is at the time: one that was replaced for a while may be closed by now."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


_stderr = cast(TextIO, _Stderr())


def configure(level: str = "INFO", json: bool | None = None) -> None:
    """Set up structlog and `logging`; `json=None` means JSON unless stderr is a terminal.

    If native code ends the process, the functions and lines that its threads were in come before; no values.
    """
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed, or none of the system's
            faulthandler.enable(sys.__stderr__)
    as_json = not sys.stderr.isatty() if json is None else json
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[Processor] = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    if as_json:
        renderer = [_tracebacks, structlog.processors.JSONRenderer(default=str)]
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.WriteLoggerFactory(_stderr),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
    )
    handler = logging.StreamHandler(_stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.getLevelNamesMapping()[level], logging.INFO))
    for chatty in ("httpx", "uvicorn.error"):  # a line for each request, and duplicates of our own events
        logging.getLogger(chatty).setLevel(logging.WARNING)
