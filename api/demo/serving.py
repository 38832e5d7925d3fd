"""The ring that the demo's acts use: `mlx_parallm_serve` with the tiny model or another one, as a child process."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from shared.process.garbage import leave_out_what_is_loaded

MODEL = "tiny"


@dataclass(frozen=True)
class DemoRing:
    """Addresses of the ring that the demo has started."""

    url: str
    redis_url: str


@contextlib.contextmanager
def ring(
    data_dir: Path, log_path: Path, workers: int, console: Console, *arguments: str, model: str = f"models/{MODEL}"
) -> Iterator[DemoRing]:
    """Start everything, wait until it is ready, and stop it at the end."""
    command = [sys.executable, "-m", "api.serve.main", "--model", model, "--port", "0"]
    command += ["--data-dir", str(data_dir), "--workers", str(workers), *arguments]
    environment = {**os.environ, "PARALLM_PARENT_PIPE": "1"}
    with log_path.open("w") as log:
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
        )
        try:
            began = time.monotonic()
            served = _wait_until_ready(server, log_path)
            console.print(f"  ready after {time.monotonic() - began:.1f} s at {served.url}")
            leave_out_what_is_loaded()  # we time streams: a full collection of ours would look like a gap of theirs
            yield served
        finally:
            stop(server)


def stop(process: "subprocess.Popen[str]", timeout_s: float = 60) -> int:
    """SIGTERM, then SIGKILL; the exit code."""
    process.terminate()
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    finally:
        for pipe in (process.stdout, process.stdin):
            if pipe is not None:
                pipe.close()


def _wait_until_ready(server: "subprocess.Popen[str]", log_path: Path) -> DemoRing:
    assert server.stdout is not None
    url = ""
    for line in server.stdout:
        if match := re.search(r"ready: (http://\S+)/v1", line):
            url = match.group(1)
        elif match := re.search(r"--redis (\S+)", line):
            return DemoRing(url, match.group(1))
    raise SystemExit(f"the server ended before it was ready; see {log_path}")
