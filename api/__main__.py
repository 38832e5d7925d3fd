"""`python -m api`: one api process under uvicorn. Each `--fd N` is an inherited listening socket to serve on."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from types import FrameType

import structlog
import uvicorn

from api.http.api_keys import check_exposure
from api.http.connections import bounded
from api.http.listening import listen
from shared.errors import ServiceUnavailableError, SetupError
from shared.process.api_settings import ApiSettings
from shared.process.garbage import leave_out_what_is_loaded, no_collections
from shared.process.lifeline import follow_parent
from shared.process.logs import configure
from shared.process.open_files import raise_file_limit
from shared.process.settings import load
from shared.redis.connection.client import require
from shared.telemetry import tracing

log = structlog.get_logger()

SPARE_FILES = 200  # besides one for each request
SHUTDOWN_S = 10  # time for requests under way at SIGTERM


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; exit code 2 when set up wrongly, 1 when no Redis answers."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        fds = take_fds(arguments)
        settings = load(ApiSettings, arguments)
        configure(settings.log_level, settings.log_json)
        if not settings.redis:
            raise SetupError(
                "an api process needs Redis: --redis URL or PARALLM_REDIS_URL (mlx_parallm_serve starts one)"
            )
        check_exposure(settings)
        tracing.start(settings.otlp_endpoint, "api")
        listeners = [_inherited(fd) for fd in fds] or listen(settings)
        asyncio.run(require(settings.redis))
    except SetupError as error:
        print(f"api: {error}", file=sys.stderr)
        return 2
    except ServiceUnavailableError as error:  # may pass, so that a supervisor tries again
        print(f"api: {error}", file=sys.stderr)
        return 1
    files = raise_file_limit()
    if files < settings.max_concurrent_requests + SPARE_FILES:
        log.warning("api.few_files", open_files=files, wanted=settings.max_concurrent_requests + SPARE_FILES)
    server = Server(_config(settings))
    signal.signal(signal.SIGTERM, _leave)  # until the loop takes its place
    follow_parent()
    for listener in listeners:
        if listener.family != socket.AF_UNIX:
            host, port = listener.getsockname()[:2]
            log.info("api.listening", url=f"http://{host}:{port}")
    leave_out_what_is_loaded()
    with contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener)
        server.run(sockets=listeners)
    tracing.stop()
    return 0 if server.started else 1


def _leave(number: int, frame: FrameType | None) -> None:
    """A signal before anything is served is a clean exit, too."""
    raise SystemExit(0)


class Server(uvicorn.Server):
    """uvicorn, but SIGTERM is a clean exit: uvicorn raises the signal again when it is done.

    The ring hears of it at once, so that endless streams end by themselves while requests under way are waited for.
    """

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Marks the ring as shutting down before uvicorn stops."""
        ring = getattr(getattr(self.config.app, "state", None), "ring", None)
        if ring is not None:
            ring.shutting_down = True
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals in the event loop while uvicorn serves."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def take_fds(arguments: list[str]) -> list[int]:
    """Remove each `--fd N` from the arguments and return its N: they belong to this process alone, not to settings."""
    fds: list[int] = []
    at = 0
    while at < len(arguments):
        name, _, value = arguments[at].partition("=")
        if name != "--fd":
            at += 1
            continue
        if not value and at + 1 < len(arguments):
            value = arguments.pop(at + 1)
        del arguments[at]
        if not value.isdigit():
            raise SetupError("--fd takes the number of an inherited listening socket")
        fds.append(int(value))
    return fds


def _inherited(fd: int) -> socket.socket:
    try:
        return socket.socket(fileno=fd)
    except OSError as error:
        raise SetupError(f"cannot listen on fd {fd}: {error.strerror or error}") from error


def _config(settings: ApiSettings) -> uvicorn.Config:
    with no_collections():
        from api.app import create_app, find_routes

        app = create_app(settings)
        find_routes(app)
    return uvicorn.Config(
        app,
        http=bounded(settings.slow_reader_s),
        reset_contextvars=True,
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
        timeout_keep_alive=75,
    )


if __name__ == "__main__":
    sys.exit(main())
