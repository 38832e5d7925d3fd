"""Resident memory of the api over many streamed requests, and the worker's over raw mlx-lm.

`python -m tests.bench.memory [--requests 10000]`. Requests are short streams of the tiny model, 32 at a time.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from tests.bench.load import load
from tests.e2e.rings import Process, ring

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}


def megabytes(processes: list[psutil.Process]) -> float:
    return sum(process.memory_info().rss for process in processes) / 1e6


def children(server: Process, module: str) -> list[psutil.Process]:
    found = psutil.Process(server.popen.pid).children(recursive=True)
    return [child for child in found if child.cmdline()[1:3] == ["-m", module]]


async def measure(url: str, server: Process, requests: int) -> None:
    api, worker = children(server, "api"), children(server, "worker")
    print(f"start            api {megabytes(api):6.1f} MB, worker {megabytes(worker):6.1f} MB")
    for done in range(0, requests, requests // 5):
        for _ in range(requests // 5 // 32):
            await load(url, "/v1/completions", [BODY] * 32)
        rss = f"api {megabytes(api):6.1f} MB, worker {megabytes(worker):6.1f} MB"
        print(f"{done + requests // 5:6d} requests  {rss}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.memory", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    arguments = parser.parse_args()
    raw = subprocess.run(
        [sys.executable, "-m", "tests.bench.peers", "memory", "models/tiny"], capture_output=True, text=True, check=True
    ).stdout
    print(f"raw mlx-lm, 32 rows of the same model: {int(raw) / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory() as folder, ring(Path(folder)) as served:
        asyncio.run(measure(served.url, served.server, arguments.requests))


if __name__ == "__main__":
    main()
