"""Overload on a real ring: goodput, first tokens, memory and recovery at a multiple of the sustainable rate.

`python -m tests.bench.overload [--seconds 60] [--times 4] [--parts load many]`. Each part has a ring of its own:

load   The best goodput (a closed loop that keeps the rows full), then `--times` as many requests a second for
       `--seconds`, arriving whatever happens; then how soon a lone request is as quick as before.
many   1,000 streams at once on one api process.

The clients run on the same machine and cost CPU of their own, so ratios within one run are what counts.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from shared.process.open_files import raise_file_limit
from tests.e2e.rings import Ring, ring

TOKENS = 64
ROWS = 32
QUEUE = 64
BEST_S = 8.0  # of a closed loop


@dataclass
class Outcome:
    """One request."""

    status: int = 0
    first_s: float = 0.0
    ended_at: float = 0.0
    tokens: int = 0
    whole: bool = False
    gaps_s: list[float] = field(default_factory=list)


def message(url: str, tokens: int, seed: int) -> bytes:
    body = {"model": "tiny", "prompt": f"{seed} + 1 =", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data


async def request(url: str, tokens: int, seed: int = 0) -> Outcome:
    """One streamed completion on a connection of its own."""
    outcome, began = Outcome(), time.perf_counter()
    writer = None
    try:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(message(url, tokens, seed))
        await _read(reader, outcome, began)
    except OSError:
        outcome.status = outcome.status or -1
    finally:
        if writer is not None:
            writer.close()
    return outcome


async def _read(reader: asyncio.StreamReader, outcome: Outcome, began: float) -> None:
    outcome.status = int((await reader.readline()).split()[1])
    last, tail = began, b""
    while block := await reader.read(65536):
        now = time.perf_counter()
        events = block.count(b"data: {")
        if events and outcome.status == 200:
            if not outcome.first_s:
                outcome.first_s = now - began
            else:
                outcome.gaps_s.append(now - last)
            outcome.tokens += events
            last = now
        tail = (tail + block)[-64:]
    outcome.whole = b"data: [DONE]" in tail and outcome.status == 200
    outcome.ended_at = time.perf_counter()


class Memory:
    """Resident memory of a ring's processes, looked at twice a second."""

    def __init__(self, served: Ring) -> None:
        tree = psutil.Process(served.server.popen.pid)
        self._processes = {name_of(each): each for each in [tree, *tree.children(recursive=True)]}
        self.samples: dict[str, list[float]] = {name: [] for name in self._processes}

    async def watch(self) -> None:
        while True:
            for name, process in self._processes.items():
                with contextlib.suppress(psutil.Error):
                    self.samples[name].append(process.memory_info().rss / 1e6)
            await asyncio.sleep(0.5)

    def shown(self) -> str:
        """Start, the mean of the second quarter, the mean of the last quarter, in MB."""
        lines = []
        for name, values in self.samples.items():
            if len(values) >= 8 and max(values) > 8:
                quarter = len(values) // 4
                second, last = values[quarter : 2 * quarter], values[-quarter:]
                figures = f"{values[0]:.0f} -> {statistics.mean(second):.0f} -> {statistics.mean(last):.0f}"
                lines.append(f"{name} {figures}")
        return ", ".join(lines)


def name_of(process: psutil.Process) -> str:
    command = process.cmdline()
    module = command[command.index("-m") + 1] if "-m" in command else Path(command[0]).name if command else "?"
    return module if module not in ("python", "python3") else f"python {process.pid}"


@contextlib.asynccontextmanager
async def watched(served: Ring) -> AsyncIterator[Memory]:
    memory = Memory(served)
    task = asyncio.create_task(memory.watch())
    try:
        yield memory
    finally:
        task.cancel()


async def closed_loop(url: str, streams: int, seconds: float) -> float:
    """Whole completions a second with so many always under way."""
    began, ends = time.perf_counter(), list[float]()

    async def client(number: int) -> None:
        while time.perf_counter() < began + seconds:
            outcome = await request(url, TOKENS, seed=number)
            ends.extend([outcome.ended_at] if outcome.whole else [])

    await asyncio.gather(*(client(i) for i in range(streams)))
    in_time = [at for at in ends if at <= began + seconds]
    return len(in_time) / seconds if in_time else 1 / (min(ends) - began)


async def open_loop(url: str, rate: float, seconds: float) -> list[Outcome]:
    """Requests that arrive at random moments, `rate` a second on average, whatever becomes of those before."""
    draw, tasks, at = random.Random(7), [], time.perf_counter()
    until = at + seconds
    while (at := at + draw.expovariate(rate)) < until:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        tasks.append(asyncio.create_task(request(url, TOKENS, seed=len(tasks))))
    return list(await asyncio.gather(*tasks))


async def load(served: Ring, seconds: float, times: float) -> None:
    lone = [(await request(served.url, TOKENS)).first_s for _ in range(5)][1:]
    await closed_loop(served.url, 4, BEST_S / 4)
    best = max([await closed_loop(served.url, ROWS + 16, BEST_S) for _ in range(2)])
    async with watched(served) as memory:
        began = time.perf_counter()
        outcomes = await open_loop(served.url, times * best, seconds)
        stopped = time.perf_counter()
        # All accepted work that was under way at the stop is done by now; a lone request has to be quick again.
        recovered_s, quick = 0.0, False
        while not quick and recovered_s < 30:
            quick = (await request(served.url, TOKENS)).first_s < max(3 * statistics.median(lone), 0.1)
            recovered_s = time.perf_counter() - stopped
    whole = [each for each in outcomes if each.whole]
    goodput = sum(each.ended_at <= began + seconds for each in whole) / seconds
    first = sorted(each.first_s for each in outcomes if each.status == 200 and each.first_s)
    print(f"best goodput {best:.1f} completions/s ({best * TOKENS:.0f} tok/s); lone first token {ms(lone)}")
    print(f"offered {len(outcomes) / seconds:.1f}/s ({times:g}x) for {seconds:g} s: goodput {goodput:.1f}/s, "
          f"{goodput / best:.2f} of best")  # fmt: skip
    print(f"statuses {dict(Counter(each.status for each in outcomes))}; accepted but not whole: "
          f"{sum(each.status == 200 and not each.whole for each in outcomes)}")  # fmt: skip
    p50, p99, longest, queue = (1000 * s for s in (at(first, 50), at(first, 99), at(first, 100), QUEUE / best))
    print(f"first token of the accepted: p50 {p50:.0f}, p99 {p99:.0f}, max {longest:.0f} ms; "
          f"the queue of {QUEUE} at the best pace: {queue:.0f} ms")  # fmt: skip
    print(f"as quick as before {recovered_s:.2f} s after the last accepted request's end")
    print(f"memory in MB, start -> second quarter -> last quarter: {memory.shown()}")


async def many(served: Ring, streams: int) -> None:
    async with watched(served) as memory:
        began = time.perf_counter()
        outcomes = await asyncio.gather(*(request(served.url, 32, seed=i) for i in range(streams)))
        took = time.perf_counter() - began
    whole = sum(each.whole for each in outcomes)
    first = sorted(each.first_s for each in outcomes if each.first_s)
    rate = sum(each.tokens for each in outcomes) / took
    print(f"{streams} streams at once: {whole} whole in {took:.1f} s, {rate:.0f} tok/s, "
          f"statuses {dict(Counter(o.status for o in outcomes))}")  # fmt: skip
    peaks = {name: max(values, default=0) for name, values in memory.samples.items()}
    print(f"first token p50 {at(first, 50):.2f}, p99 {at(first, 99):.2f} s; peak memory in MB: "
          + ", ".join(f"{name} {peak:.0f}" for name, peak in peaks.items() if peak > 8))  # fmt: skip


def at(values: list[float], percent: float) -> float:
    return values[min(len(values) - 1, int(len(values) * percent / 100))] if values else 0.0


def ms(values: list[float]) -> str:
    return f"{min(values) * 1000:.0f} {statistics.median(values) * 1000:.0f} {max(values) * 1000:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--times", type=float, default=4)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--parts", nargs="+", choices=["load", "many"], default=["load", "many"])
    chosen: Any = parser.parse_args()
    raise_file_limit()
    for part in chosen.parts:
        print(f"-- {part}", flush=True)
        queue = QUEUE if part == "load" else 4096
        with (
            tempfile.TemporaryDirectory() as folder,
            ring(Path(folder), "--max-batch-size", str(ROWS), "--max-queue-size", str(queue)) as served,
        ):
            if part == "load":
                asyncio.run(load(served, chosen.seconds, chosen.times))
            else:
                asyncio.run(many(served, chosen.streams))


if __name__ == "__main__":
    main()
