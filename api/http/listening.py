"""The sockets that an api listens on: its own, and where the settings say so the one of Ollama's clients."""

import contextlib
import socket
from pathlib import Path

from shared.errors import SetupError
from shared.process.api_settings import ApiSettings

BACKLOG = 2048


def listen(settings: ApiSettings) -> list[socket.socket]:
    """The listening sockets, the api's own first; SetupError names the one that cannot be had."""
    with contextlib.ExitStack() as undo:
        own = _unix(settings.uds) if settings.uds else _port(settings.host, settings.port, "--port")
        sockets = [undo.enter_context(own)]
        if settings.ollama_port:
            sockets.append(undo.enter_context(_port(settings.host, settings.ollama_port, "--ollama-port")))
        undo.pop_all()
    return sockets


def _port(host: str, port: int, flag: str) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise SetupError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another {flag}") from error


def _unix(path: str) -> socket.socket:
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise SetupError(f"cannot listen on --uds {path}: {error.strerror or error}") from error
    listener.listen(BACKLOG)
    return listener
