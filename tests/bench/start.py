"""Seconds from a worker's start to `worker.ready`, to the end of a first sequence, and to the end of its warm-up.

    python -m tests.bench.start --model FOLDER [--starts 2] [--warm-s 90] [-- flags of the worker]

The first start finds no compiled kernels: MLX's cache of CUDA kernels is an empty folder, which the later ones share.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from redis.asyncio import Redis

from shared.redis.processes.worker_registry import WorkerRegistry
from shared.redis.queue.sequence_calls import SequenceCalls
from shared.redis.server_binary import find_binary
from shared.sequences import SamplingParams, SequenceSpec

PORT = 7391
START_S = 120.0  # of a worker, at most
URL = f"redis://127.0.0.1:{PORT}"
_LOADED, _READY, _WARM = "engine.warms_up", "worker.ready", re.compile(r"engine\.warm (.*?_s=[\d.]+ \S*_s=[\d.]+)")


async def first_sequence(number: int) -> float:
    """Seconds of eight tokens behind a prompt of 32, the first that the worker is asked for."""
    async with Redis.from_url(URL) as redis:
        (card,) = await WorkerRegistry(redis).models()
        async with SequenceCalls(redis, card.name, f"start-{number}") as calls:
            asked = SequenceSpec(f"s{number}", card.name, tuple(range(32)), SamplingParams(8, 0), job=calls.owner)
            began = time.perf_counter()
            await calls.call([asked])
            return time.perf_counter() - began


def started(model: str, flags: list[str], number: int, warm_s: float, kernels: Path) -> str:
    """One start, as a line of figures."""
    began = time.perf_counter()
    worker = subprocess.Popen(
        [sys.executable, "-m", "worker", "--model", model, "--redis", URL, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "MLX_PTX_CACHE_DIR": str(kernels)},
    )
    assert worker.stdout is not None
    figures: dict[str, str] = {}
    seen = []
    patience = threading.Timer(START_S, worker.terminate)
    patience.start()
    try:
        for line in worker.stdout:
            seen.append(line)
            since = f"{time.perf_counter() - began:.1f} s"
            if _LOADED in line:
                figures["loaded"] = since
            if _READY in line:
                figures["ready"] = since
                figures["first sequence"] = f"{asyncio.run(first_sequence(number)):.2f} s"
                patience.cancel()
                patience = threading.Timer(warm_s, worker.terminate)
                patience.start()
            if warm := _WARM.search(line):
                figures["warm"] = f"{since} ({warm[1]})"
            if "ready" in figures and ("warm" in figures or not warm_s):
                break
    finally:
        patience.cancel()
        worker.terminate()
        worker.wait()
        worker.stdout.close()
    return ", ".join(f"{what} {took}" for what, took in figures.items()) or "".join(seen[-20:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.start")
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument(
        "--warm-s",
        type=float,
        default=90,
        help="that the end of a warm-up is waited for after the first sequence; 0: it is not",
    )
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        redis = subprocess.Popen(
            [str(find_binary()), "--port", str(PORT), "--save", "", "--dir", folder, "--logfile", "log"]
        )
        try:
            for number in range(args.starts):
                print(f"start {number + 1}:", started(args.model, flags, number, args.warm_s, Path(folder)), flush=True)
        finally:
            redis.terminate()
            redis.wait()


if __name__ == "__main__":
    main()
