"""Real rings for the tests: the processes of `mlx_parallm_serve`, started, looked at from outside, killed."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from shared.redis.connection.client import connect
from shared.redis.processes.worker_registry import WorkerRegistry, WorkerStatus
from tests.waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[2]
MODEL = "tiny"
LAST_LINES_S = 3  # children may hold the pipe after the death of the process that started them


@dataclass
class Process:
    """A process of ours and what it has printed."""

    popen: "subprocess.Popen[str]"
    lines: list[str] = field(default_factory=list)
    _reading: threading.Thread = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    @classmethod
    def start(cls, module: str, *arguments: str, environment: dict[str, str] | None = None) -> "Process":
        popen = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, "PARALLM_PARENT_PIPE": "1", **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return cls(popen)

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self.popen.stdout:
                self.lines.append(line)

    def wait_for_line(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + HANG_S
        while True:
            over = time.monotonic() > deadline
            if self.popen.poll() is not None:
                self.wait()
                over = True
            for line in list(self.lines):
                found = re.search(pattern, line)
                if found:
                    return found
            assert not over, f"no line like {pattern!r} in:\n{self.output}"
            threading.Event().wait(0.02)

    def printed(self, text: str) -> list[str]:
        return [line for line in list(self.lines) if text in line]

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait(self) -> int:
        """The exit code, once `lines` has all that was printed."""
        code = self.popen.wait(HANG_S)
        self._reading.join(LAST_LINES_S)
        return code

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        try:
            return self.wait()
        finally:
            if self.popen.poll() is None:
                self.popen.kill()
                self.popen.wait()
            for pipe in (self.popen.stdin, self.popen.stdout):
                if pipe is not None:
                    pipe.close()


@dataclass
class Ring:
    """A served tiny model."""

    server: Process
    url: str
    redis_url: str

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    def workers(self) -> list[WorkerStatus]:
        """The live workers, read from Redis."""

        async def read() -> list[WorkerStatus]:
            redis = connect(self.redis_url)
            try:
                return await WorkerRegistry(redis).workers(MODEL)
            finally:
                await redis.aclose()

        return asyncio.run(read())

    def health(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/health", timeout=HANG_S).json()


@contextlib.contextmanager
def ring(
    data_dir: Path, *arguments: str, model: Path = Path("models", MODEL), environment: dict[str, str] | None = None
) -> Iterator[Ring]:
    """Start `mlx_parallm_serve` on a free port; stop it at the end and expect a clean exit."""
    server = Process.start(
        "api.serve.main", "--model", str(model), "--port", "0", "--data-dir", str(data_dir), *arguments,
        environment=environment,
    )  # fmt: skip
    try:
        url = server.wait_for_line(r"ready: (http://\S+)/v1").group(1)
        redis_url = server.wait_for_line(r"--redis (\S+)").group(1)
        yield Ring(server, url, redis_url)
        assert server.popen.poll() is None, f"the server died:\n{server.output}"
    finally:
        code = server.stop()
    assert code == 0, f"exit code {code}:\n{server.output}"


PASSWORD = "s3cret"


@contextlib.contextmanager
def two_workers_over(redis_url: str, data_dir: Path) -> Iterator[Ring]:
    """A ring with two workers on a Redis that asks for PASSWORD, which none of its processes prints."""
    flags = ("--workers", "2", "--lease-ms", "1000", "--redis", redis_url)
    with ring(data_dir, *flags) as started:
        asyncio.run(wait_until(lambda: len(started.server.printed("worker.ready")) == 2))
        yield started
    assert PASSWORD not in started.server.output
