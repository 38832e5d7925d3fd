"""Requests that get their first token in time, in overload: `python -m tests.bench.admission [--seconds 20]`.

The product's workers around a model that only keeps time (timed_worker.py: each step takes a chunk of prompt tokens in
and brings a token of each row), and requests that arrive whatever happens, through `Ring`, `Generation` and a real
Redis. Each has a deadline for its first token. Compared are: no bound, admission by predicted time, and fixed limits of
the queue. The workers live through all of a workload's runs, as they would; the first run by time finds workers that
have measured nothing yet.

`kept` is the share of accepted requests whose first token met the deadline, `goodput` those requests per second that
also came to their end, `of best` its ratio to the best of all ways, `retry` the median of `Retry-After`.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from api.generation.running import Generation, settled
from api.generation.sequences import Sequences
from api.ring.ring import Ring
from api.serve.embedded_redis import EmbeddedRedis
from shared.errors import DeadlineExceededError, LateFirstTokenError, QueueFullError
from shared.process.api_settings import ApiSettings
from shared.process.logs import configure
from shared.process.settings import load
from shared.sequences import SamplingParams, SequenceSpec
from tests.bench.redis_scaling import MODEL
from tests.bench.timed_worker import TimedEngine, work
from tests.waiting import wait_until

WORKERS, ROWS, STEP_S, CHUNK = 2, 16, 0.04, 512
LIMITS = (8, 16, 32, 64)
BY_TIME = "--admit-by-time"
SETTLED_S = 3.0  # after a run: heartbeats say that rows are free


@dataclass(frozen=True)
class Workload:
    """Lengths that requests draw from, in turns of `turn_s`, and the deadline of their first tokens."""

    name: str
    deadline_s: float
    tokens: tuple[int, ...]  # of completions, in each turn
    prompts: tuple[int, ...]
    turn_s: float = 5.0
    times: float = 3.0  # of what the workers carry

    def lengths(self, at_s: float, draw: random.Random) -> tuple[int, int]:
        """Prompt and completion of a request that arrives then."""
        turn = int(at_s / self.turn_s)
        prompt, tokens = self.prompts[turn % len(self.prompts)], self.tokens[turn % len(self.tokens)]
        return draw.randint(prompt // 2, prompt * 3 // 2), draw.randint(tokens // 2, tokens * 3 // 2)

    @property
    def carried(self) -> float:
        """Requests a second that the rows carry, about: of the longest turn's pace and the shortest's, the mean."""
        turns = [(t, p) for t in self.tokens for p in self.prompts]
        paces = [min(WORKERS * ROWS / (t * STEP_S), WORKERS * CHUNK / (p * STEP_S)) for t, p in turns]
        return statistics.mean(paces)


WORKLOADS = {
    "even": Workload("even", 2.0, (24,), (64,)),
    "short": Workload("short", 0.5, (24,), (64,)),
    "prompts": Workload("prompts", 2.0, (8,), (600,)),
    "changing": Workload("changing", 2.0, (12, 48), (64, 64)),
}


@dataclass
class Figures:
    """One run."""

    offered: int = 0
    refused: int = 0
    accepted: int = 0
    kept: int = 0
    whole: int = 0  # of those kept
    first_s: list[float] = field(default_factory=list)
    retries: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def share(self) -> float:
        return self.kept / max(1, self.accepted)

    @property
    def goodput(self) -> float:
        return self.whole / self.seconds


def be_workers(pipe: Connection, url: str, folder: str) -> None:
    """The process of the workers, until the other end is closed."""
    configure("ERROR", True)
    TimedEngine.prefill_chunk = CHUNK
    names = {f"w{i}": MODEL for i in range(WORKERS)}

    async def run() -> None:
        working = asyncio.create_task(work(url, names, ROWS, STEP_S, Path(folder), lambda: pipe.send("ready")))
        with contextlib.suppress(EOFError):
            await asyncio.to_thread(pipe.recv)
        working.cancel()
        await asyncio.wait({working})

    uvloop.run(run())


@contextlib.contextmanager
def workers(url: str) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        child = context.Process(target=be_workers, args=(theirs, url, folder), daemon=True)
        child.start()
        theirs.close()
        assert ours.poll(120) and ours.recv() == "ready", child
        yield
        ours.close()
        child.join(30)
        if child.is_alive():
            child.kill()


async def request(ring: Ring, name: str, prompt: int, tokens: int, deadline_s: float, figures: Figures) -> None:
    """One client, who leaves when it is refused."""
    began = time.time()
    template = SequenceSpec(name, MODEL, (), SamplingParams(tokens, seed=1))
    job = Sequences(template, (tuple(2 + i % 190 for i in range(prompt)),))
    figures.offered += 1
    try:
        generation = await Generation.start(ring, job)
    except QueueFullError as error:
        figures.refused += 1
        if isinstance(error, LateFirstTokenError):
            figures.retries.append(error.retry_after_s)
        return
    figures.accepted += 1
    first = 0.0
    try:
        async for events in generation.batches():
            if not first and any(event.tokens for _, event in events):
                first = time.time() - began
        if first <= deadline_s:
            figures.whole += 1
    except DeadlineExceededError:
        pass
    finally:
        generation.close()
    figures.first_s.append(first or float("inf"))
    figures.kept += bool(first) and first <= deadline_s


async def run(url: str, workload: Workload, seconds: float, *flags: str) -> Figures:
    """Requests of a workload for so long, at a rate of several times what the workers carry, by chance."""
    settings = load(ApiSettings, ["--redis", url, "--first-token-timeout-s", str(workload.deadline_s), *flags])
    ring, figures, draw = Ring(settings), Figures(), random.Random(7)
    await ring.start()
    await ring.live_models()
    rate, began = workload.carried * workload.times, time.monotonic()
    requests: set[asyncio.Task[None]] = set()
    at = 0.0
    while (at := at + draw.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        prompt, tokens = workload.lengths(at, draw)
        name = f"{ring.api_id}-{figures.offered}"
        task = asyncio.create_task(request(ring, name, prompt, tokens, workload.deadline_s, figures))
        requests.add(task)
        task.add_done_callback(requests.discard)
    await asyncio.gather(*requests)
    figures.seconds = time.monotonic() - began
    await settled()
    await wait_until(lambda: _idle(ring))
    await ring.stop()
    await asyncio.sleep(SETTLED_S)
    return figures


async def _idle(ring: Ring) -> bool:
    depth = await ring.queue(MODEL).depth()
    return not any(each.waiting or each.leased for each in depth.values())


async def burst(url: str, rounds: int = 5) -> int:
    """Refusals of as many requests at once as there are rows, on idle workers that have measured their pace."""
    flags = ["--redis", url, "--first-token-timeout-s", "0.5", BY_TIME]
    ring, figures = Ring(load(ApiSettings, flags)), Figures()
    await ring.start()
    for number in range(rounds):
        await ring.live_models()
        await asyncio.gather(
            *(request(ring, f"{ring.api_id}-b{number}-{i}", 16, 8, 0.5, figures) for i in range(WORKERS * ROWS))
        )
        await asyncio.sleep(SETTLED_S)
    await settled()
    await ring.stop()
    return figures.refused


def row(name: str, figures: Figures, best: float) -> str:
    first = sorted(figures.first_s) or [0.0]
    retry = f"{statistics.median(figures.retries):5.0f}" if figures.retries else "    -"
    return (
        f"{name:12s} {figures.offered:8d} {figures.accepted:8d} {figures.share:6.3f} {figures.goodput:8.1f} "
        f"{figures.goodput / best:7.2f} {first[len(first) // 2]:8.2f} {first[int(len(first) * 0.98)]:8.2f} {retry}"
    )


async def compare(url: str, workload: Workload, seconds: float) -> None:
    """One workload, each way in turn."""
    ways: dict[str, tuple[str, ...]] = {"time, cold": (BY_TIME,), "none": ("--max-queue-size", "100000")}
    ways |= {f"limit {limit}": ("--max-queue-size", str(limit)) for limit in LIMITS}
    ways |= {"time": (BY_TIME,)}
    figures: dict[str, Any] = {}
    with workers(url):
        for name, flags in ways.items():
            figures[name] = await run(url, workload, seconds, *flags)
        refused = await burst(url)
    best = max(each.goodput for each in figures.values())
    rate = workload.times * workload.carried
    print(f"\n{workload.name}: deadline {workload.deadline_s} s, {rate:.0f} requests a second")
    print("way           offered accepted   kept  goodput of best  p50 s    p98 s  retry", flush=True)
    for name, each in figures.items():
        print(row(name, each, best), flush=True)
    print(f"refused of 5 bursts of {WORKERS * ROWS} requests on idle workers: {refused}", flush=True)


def main() -> int:
    """Run the workloads one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    chosen = parser.parse_args()
    configure("ERROR", True)
    for name in chosen.workloads:
        with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder)) as server:
            uvloop.run(compare(server.url, WORKLOADS[name], chosen.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
