"""CPU of one api process per streamed token: `python -m tests.bench.api_cost [--streams 32] [--rate 100]`.

A writer plays the worker: every decode step one frame with a token for every stream. Clients are raw sockets in this
process, so the api process's CPU time is the api's alone. `--rate 0` writes as fast as Redis takes it.
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
from redis.asyncio import Redis

from api.serve.embedded_redis import EmbeddedRedis
from shared.frames import Finish, TokenEvent, TokenLogprob
from shared.redis.connection.client import connect
from shared.redis.processes.worker_registry import WorkerRegistry, WorkerStatus
from shared.redis.queue.sequence_queue import ClaimPlan, SequenceQueue
from shared.redis.tokens.writer import FrameWriter
from shared.sequences import ModelCard, SequenceSpec
from tests.bench.load import load
from tests.e2e.rings import Process
from tests.unit.api_texts import EOS, bundle, codec

MODEL = "flood"


@contextlib.asynccontextmanager
async def worker(redis: Redis) -> AsyncIterator[None]:
    """The ring has one, by its heartbeat."""
    card = ModelCard(MODEL, 1 << 20, codec().vocab_size, (EOS,), bundle().sha256, "base", 64, "float32")
    registry = WorkerRegistry(redis)
    await registry.register_model(card, bundle())

    async def beat() -> None:
        while True:
            now = time.time_ns() // 1_000_000
            await registry.heartbeat(WorkerStatus("w1", MODEL, "host", 1, "ready", 0, 999, 0, 0, 1, 0.0, 0, now, now))
            await asyncio.sleep(1)

    async with asyncio.TaskGroup() as group:
        beating = group.create_task(beat())
        yield
        beating.cancel()


async def play(redis: Redis, streams: int, steps: int, rate: float, started: asyncio.Event) -> float:
    """Claim all streams, then write their tokens; returns the seconds of writing."""
    queue, writer = SequenceQueue(redis, MODEL), FrameWriter(redis, MODEL, "w1")
    specs: list[SequenceSpec] = []
    while len(specs) < streams:
        plan = ClaimPlan(streams, streams, 0, streams, 1 << 30, False)
        specs += [claim.spec for claim in await queue.claim("w1", plan)]
        await asyncio.sleep(0.01)
    started.set()
    draw = random.Random(1)
    began = time.perf_counter()
    for step in range(steps):
        finish = Finish("length") if step == steps - 1 else None
        events = [event(spec, step, draw.randrange(34, 120), finish) for spec in specs]
        await writer.write({specs[0].api: events}, {}, [])
        if rate:
            await asyncio.sleep(max(0.0, began + (step + 1) / rate - time.perf_counter()))
    return time.perf_counter() - began


def event(spec: SequenceSpec, position: int, token: int, finish: Finish | None) -> TokenEvent:
    top = spec.sampling.top_logprobs
    tops = None if not top else [tuple(TokenLogprob(token + k, -1.0 - k) for k in range(top))]
    return TokenEvent(spec.id, 1, position, [token], [-1.25], tops, finish=finish)


@contextlib.asynccontextmanager
async def serving(redis_url: str) -> AsyncIterator[tuple[str, psutil.Process]]:
    process = await asyncio.to_thread(
        Process.start, "api", "--port", "0", "--redis", redis_url, environment={"PARALLM_LOG_LEVEL": "INFO"}
    )
    try:
        found = await asyncio.to_thread(process.wait_for_line, r"(http://127\.0\.0\.1:\d+)")
        await asyncio.to_thread(process.wait_for_line, r"api\.started")
        yield found.group(1), psutil.Process(process.popen.pid)
    finally:
        await asyncio.to_thread(process.stop)


async def measure(path: str, extra: dict[str, Any], streams: int, steps: int, rate: float) -> str:
    with EmbeddedRedis(Path(tempfile.mkdtemp())) as server:
        redis = connect(server.url)
        async with worker(redis), serving(server.url) as (url, process):
            prompt: dict[str, Any] = (
                {"messages": [{"role": "user", "content": "go"}]} if "chat" in path else {"prompt": "go"}
            )
            body = {"model": MODEL, **prompt, "max_tokens": steps, **extra}
            started = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                clients = group.create_task(load(url, path, [body] * streams))
                playing = group.create_task(play(redis, streams, steps, rate, started))
                await started.wait()
                before = process.cpu_times()
            took, figures, after = playing.result(), clients.result(), process.cpu_times()
        await redis.aclose()
    cpu = after.user + after.system - before.user - before.system
    tokens = streams * steps
    gaps = sorted(1000 * gap for stream in figures.streams for gap in stream.gaps_s)
    return (
        f"{1e6 * cpu / tokens:6.1f} us of api CPU a token ({tokens / took:,.0f} tok/s written, "
        f"{tokens / figures.took_s:,.0f} tok/s read; gap p50 {gaps[len(gaps) // 2]:.1f} p99 "
        f"{gaps[int(len(gaps) * 0.99)]:.1f} ms)"
    )


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--cases", type=int, default=4, help="of four, so many")
    chosen = parser.parse_args()
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("chat", "/v1/chat/completions", {}),
        ("completions", "/v1/completions", {}),
        ("completions, logprobs 5", "/v1/completions", {"logprobs": 5}),
        ("chat, top_logprobs 5", "/v1/chat/completions", {"logprobs": True, "top_logprobs": 5}),
    ]
    for name, path, extra in cases[: chosen.cases]:
        print(f"{name:24}", await measure(path, extra, chosen.streams, chosen.steps, chosen.rate), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("PARALLM_LOG_JSON", "1")
    sys.exit(asyncio.run(main()))
