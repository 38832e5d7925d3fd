"""How many workers and apis one Redis carries: `python -m tests.bench.redis_scaling [--workers 1 2 4 ...]`.

N of the product's workers around a model that only keeps time (timed_worker.py), and M api processes without HTTP: the
app's life (`Ring` and what runs beside requests), and streams through `ring_for`, `Generation` and `FrameReader`. All
against one real embedded Redis. Workers and apis share a few operating system processes, so on a small machine *they*
run out of CPU long before Redis does. Therefore the figures of Redis are its own: CPU of its main thread, calls by
command, memory. `kept` is tokens delivered over tokens offered, `steps` decode steps done over those that should have
been.

`--tokens-per-s T` keeps the total constant: the decode step becomes longer as workers are added, so what is left to
see is what workers cost by being there. `full at` extrapolates: the tok/s at which Redis' one thread would have no time
left, were all else in proportion.
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import redis as sync_redis
import uvloop
from fastapi import FastAPI

from api.app import life
from api.generation.running import Generation
from api.generation.sequences import Sequences
from api.ring.choosing import ring_for
from api.ring.ring import Ring
from shared.process.api_settings import ApiSettings
from shared.process.logs import configure
from shared.process.open_files import many_files, raise_file_limit
from shared.process.settings import load
from shared.redis.connection.client import Script
from shared.sequences import SamplingParams, SequenceSpec
from shared.telemetry.metrics import Tally
from tests.bench.servers import Servers, model_names, servers

MODEL = model_names(1)[0]
WARM_UP_S = 3.0
DELAYS_KEPT = 200_000
SAMPLE_S = 2.0
HEADER = (
    "workers apis  step ms  offered delivered  kept  steps  seq/s | Redis: main %  all %  % per 1k tok/s   full at  "
    "calls/s     MB | p50 ms   p99 ms | simulators' cores  load"
)


@dataclass(frozen=True)
class Level:
    """One measurement's shape."""

    workers: int
    apis: int
    rows: int
    step_s: float
    prompt: int
    tokens: int
    fill: float  # streams in flight over rows
    slow: int = 1  # how many seconds a second takes (slow_time.py)
    rings: int = 1  # of one Redis each, in front of which all apis stand
    shards: int = 1  # of the only ring's Redis
    models: int = 1  # each served by as many workers
    held: bool = False  # each Redis has no more CPU than a core at full pace (servers.py)

    @property
    def offered(self) -> float:
        """Tokens a simulated second if every row that has a stream were full and every step on time."""
        return self.workers * self.rows / self.step_s * min(1.0, self.fill)


# -- the simulators, each in a process


def be_workers(pipe: Connection, urls: list[str], level: Level, count: int, first: int, folder: str) -> None:
    """A process of workers of one ring."""
    with many_files():
        from tests.bench.slow_time import LEASE_MS, slow_down, slow_url
        from tests.bench.timed_worker import TimedEngine, work

    configure("ERROR", True)
    slow_down(level.slow)

    async def run() -> None:
        up = asyncio.Event()
        step_s, lease_ms = level.step_s * level.slow, LEASE_MS * level.slow
        slowed = slow_url(urls[first * level.rings // level.workers], level.slow)
        models = model_names(level.models)
        served = {f"w{i}": models[i % level.models] for i in range(first, first + count)}
        working = asyncio.create_task(work(slowed, served, level.rows, step_s, Path(folder), up.set, lease_ms=lease_ms))
        waiting = asyncio.create_task(up.wait())
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await answer(pipe, working, lambda: sum(engine.steps for engine in TimedEngine.all))
        working.cancel()
        await asyncio.wait({working})

    uvloop.run(run())


@dataclass
class Heard:
    """What the readers of one process have seen."""

    tokens: int = 0
    sequences: int = 0
    delays: list[float] = field(default_factory=list)  # seconds from decode step to reader


def be_apis(pipe: Connection, urls: list[str], level: Level, count: int, first: int) -> None:
    """A process of apis, each with its share of the streams in flight; the first ring is their own."""
    from tests.bench.slow_time import slow_down, slow_url

    configure("ERROR", True)
    raise_file_limit()
    slow_down(level.slow)
    heard = Heard()
    home, *others = (slow_url(url, level.slow) for url in urls)
    more = [part for i, url in enumerate(others) for part in ("--ring", f"ring{i + 1}={url}")]

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            rings = []
            for i in range(first, first + count):
                app = FastAPI()
                settings = load(ApiSettings, ["--redis", home, "--api-id", f"a{i}", *more])
                await stack.enter_async_context(life(settings, Tally())(app))
                rings.append(app.state.ring)
            streams = round(level.workers * level.rows * level.fill * count / level.apis)
            models = model_names(level.models)
            reading = asyncio.gather(
                *(stream(rings[i % count], models[(first + i) % level.models], level, heard, i) for i in range(streams))
            )
            await answer(pipe, reading, lambda: (heard.tokens, heard.sequences, heard.delays[-DELAYS_KEPT:]))
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading

    uvloop.run(run())


async def stream(front: Ring, model: str, level: Level, heard: Heard, number: int) -> None:
    """One client: request after request, each read to its end. The first ones differ in length, so that ends spread."""
    for count in itertools.count():
        length = level.tokens if count else 1 + number * 7919 % level.tokens
        ring = (await ring_for(front, model, conversation="")).ring
        served = await ring.served(model)
        draw = random.Random(f"{ring.api_id} {number} {count}")
        prompt = tuple(draw.randrange(2, 200) for _ in range(level.prompt))
        sampling, deadline = SamplingParams(length, seed=1), int(1000 * (time.time() + 600))
        name = f"{ring.api_id}-{number}-{count}"
        generation = await Generation.start(
            ring, Sequences(SequenceSpec(name, served.card.name, (), sampling, deadline_ms=deadline), (prompt,))
        )
        try:
            async for events in generation.batches():
                now = time.time()
                for _, event in events:
                    heard.tokens += len(event.tokens)
                    heard.delays += [now - at for at in event.logprobs]
        finally:
            generation.close()
        heard.sequences += 1
        if len(heard.delays) > 2 * DELAYS_KEPT:
            del heard.delays[:DELAYS_KEPT]


async def answer(pipe: Connection, working: "asyncio.Future[Any]", counts: Callable[[], Any]) -> None:
    """Say ready, then the counts at every question, until the other end is closed or the work has failed."""
    pipe.send("ready")
    while True:
        try:
            await asyncio.to_thread(pipe.recv)
        except EOFError:
            return
        if working.done():
            working.result()
        pipe.send(counts())


# -- the measurement


@dataclass(frozen=True)
class Counts:
    """Of all simulators, since their start."""

    steps: int
    tokens: int
    sequences: int
    delays: list[float]  # sorted


class Simulators:
    """The processes of one level."""

    def __init__(self, urls: list[str], level: Level, folder: str, processes: int) -> None:
        self._level, self._urls = level, urls
        self._context = multiprocessing.get_context("spawn")
        self._ready: list[tuple[Any, Connection]] = []
        parts = shares(level.workers, max(level.rings, processes // level.rings * level.rings))
        self._worker_processes = len(parts)
        self._start([(be_workers, count, first, folder) for count, first in parts])
        self._start([(be_apis, count, first) for count, first in shares(level.apis, processes)])

    def _start(self, calls: list[tuple[Any, ...]]) -> None:
        started = []
        for target, *arguments in calls:
            ours, theirs = self._context.Pipe()
            child = self._context.Process(
                target=target, args=(theirs, self._urls, self._level, *arguments), daemon=True
            )
            child.start()
            theirs.close()
            started.append((child, ours))
        self._ready += started
        for child, pipe in started:
            assert pipe.poll(600) and pipe.recv() == "ready", child

    def ask(self) -> Counts:
        """What has happened so far."""
        for _, pipe in self._ready:
            pipe.send("?")
        answers = [pipe.recv() for _, pipe in self._ready]
        workers, apis = answers[: self._worker_processes], answers[self._worker_processes :]
        delays = sorted(delay for _, _, part in apis for delay in part)
        return Counts(sum(workers), sum(tokens for tokens, _, _ in apis), sum(ended for _, ended, _ in apis), delays)

    def cpu_s(self) -> tuple[float, float]:
        """CPU that workers and apis have used."""
        used = [sum(psutil.Process(child.pid).cpu_times()[:2]) for child, _ in self._ready]
        return sum(used[: self._worker_processes]), sum(used[self._worker_processes :])

    def stop(self) -> None:
        """Readers first, then workers."""
        for child, pipe in reversed(self._ready):
            pipe.close()
            child.join(10)
            if child.is_alive():
                child.kill()


def shares(total: int, parts: int) -> list[tuple[int, int]]:
    """(how many, number of the first) for each part that gets any."""
    bounds = [total * i // min(parts, total) for i in range(min(parts, total) + 1)]
    return [(after - before, before) for before, after in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class Seen:
    """One Redis at one moment."""

    at: float
    main_s: float  # CPU of its main thread
    all_s: float
    commands: dict[str, tuple[int, int]]  # calls, microseconds
    memory: int
    sent_bytes: int
    clients: int

    @classmethod
    def now(cls, client: "sync_redis.Redis[bytes]") -> "Seen":
        """By its own account."""
        cpu = client.info("cpu")
        commands = {
            name.removeprefix("cmdstat_"): (int(stat["calls"]), int(stat["usec"]))
            for name, stat in client.info("commandstats").items()
        }
        main = cpu["used_cpu_sys_main_thread"] + cpu["used_cpu_user_main_thread"]
        whole = cpu["used_cpu_sys"] + cpu["used_cpu_user"]
        memory, sent = client.info("memory")["used_memory"], client.info("stats")["total_net_output_bytes"]
        clients = client.info("clients")["connected_clients"]
        return cls(time.perf_counter(), main, whole, commands, memory, sent, clients)


@dataclass(frozen=True)
class Served:
    """One Redis between two moments."""

    before: Seen
    after: Seen

    @property
    def took(self) -> float:
        return self.after.at - self.before.at

    @property
    def main(self) -> float:
        """Share of its main thread."""
        return (self.after.main_s - self.before.main_s) / self.took

    @property
    def sent_bytes(self) -> float:
        """A second."""
        return (self.after.sent_bytes - self.before.sent_bytes) / self.took

    def calls(self, *names: str) -> float:
        """A second, of these commands or of all."""
        kept = [name for name in self.after.commands if not names or name in names]
        return sum(self.after.commands[n][0] - self.before.commands.get(n, (0, 0))[0] for n in kept) / self.took


@dataclass(frozen=True)
class Figures:
    """Of one level, over `took` seconds."""

    level: Level
    start: dict[str, int]  # calls by command until all were there
    servers: list[Served]
    counts: Counts  # at the end
    steps: int
    tokens: int
    sequences: int
    workers_s: float  # CPU
    apis_s: float
    scripts: dict[str, list[int]]

    @property
    def took(self) -> float:
        return self.servers[0].took

    @property
    def first(self) -> Served:
        """The only server of most measurements."""
        return self.servers[0]

    @property
    def main(self) -> float:
        """Shares of the main threads, together."""
        return sum(server.main for server in self.servers)

    @property
    def busiest(self) -> float:
        """The largest of them."""
        return max(server.main for server in self.servers)

    @property
    def clients(self) -> int:
        """Connections of all servers."""
        return sum(server.after.clients for server in self.servers)

    def calls(self, *names: str) -> float:
        """A second, of these commands or of all."""
        return sum(server.calls(*names) for server in self.servers)

    def delay_ms(self, share: float) -> float:
        """From a decode step to its reader, of this share of the last tokens, in simulated time."""
        late = self.counts.delays
        return 1000 * late[int((len(late) - 1) * share)] / self.level.slow if late else math.nan


def settle(clients: "list[sync_redis.Redis[bytes]]", level: Level) -> None:
    """Until there are no more connections than half a simulated second before, and all have told of themselves.

    Those of a cluster's clients also come and go, to ask who has which slots.
    """
    pause = max(WARM_UP_S, level.slow / 2)
    before = 0
    while (now := sum(int(client.info("clients")["connected_clients"]) for client in clients)) > 1.02 * before:
        before = now
        time.sleep(pause)


def measure(level: Level, seconds: float, processes: int, show_commands: bool = False) -> Figures:
    """Run one level, and see what Redis had to do."""
    raise_file_limit()  # it is the server's, too
    with (
        tempfile.TemporaryDirectory() as folder,
        servers(Path(folder), level.rings, level.shards, level.slow) as redis,
    ):
        simulators = Simulators(redis.urls, level, folder, processes)
        try:
            start = [Seen.now(client) for client in redis.clients]
            with redis.shared(level.slow) if level.held else contextlib.nullcontext():
                return _measure(level, seconds, simulators, redis, start, show_commands)
        finally:
            simulators.stop()


def _measure(
    level: Level, seconds: float, simulators: Simulators, redis: Servers, start: list[Seen], show_commands: bool
) -> Figures:
    while level.offered and not simulators.ask().sequences:
        time.sleep(0.2)
    settle(redis.clients, level)
    counts, cpu, before = simulators.ask(), simulators.cpu_s(), [Seen.now(client) for client in redis.clients]
    time.sleep(seconds)
    after, cpu_after, counts_after = [Seen.now(c) for c in redis.clients], simulators.cpu_s(), simulators.ask()
    calls: dict[str, int] = {}
    for seen in start:
        for name, (count, _) in seen.commands.items():
            calls[name] = calls.get(name, 0) + count
    return Figures(
        level,
        calls,
        [Served(*both) for both in zip(before, after, strict=True)],
        counts_after,
        counts_after.steps - counts.steps,
        counts_after.tokens - counts.tokens,
        counts_after.sequences - counts.sequences,
        cpu_after[0] - cpu[0],
        cpu_after[1] - cpu[1],
        sample_scripts(redis.clients[0]) if show_commands else {},
    )


def show(seen: Figures) -> None:
    """Print one row, and what Redis was asked to do, where that was looked at."""
    level, took, main = seen.level, seen.took, seen.main
    rate = seen.tokens / took
    steps = seen.steps * level.step_s / took / level.workers
    first = seen.first
    print(
        f"{level.workers:7d} {level.apis:4d} {1000 * level.step_s:8.1f} {level.offered:8,.0f} {rate:9,.0f} "
        f"{rate / level.offered if level.offered else math.nan:5.2f}  {steps:5.2f} "
        f"{seen.sequences / took:6.1f} | {100 * main:13.1f} "
        f"{100 * (first.after.all_s - first.before.all_s) / took:6.1f} "
        f"{100_000 * main / rate if rate else math.nan:15.2f} "
        f"{rate / main:9,.0f} {seen.calls():8,.0f} {first.after.memory / 1e6:6.1f} | {seen.delay_ms(0.5):6.1f} "
        f"{seen.delay_ms(0.99):8.1f} | {(seen.workers_s + seen.apis_s) / took:17.2f} {os.getloadavg()[0]:5.1f}",
        flush=True,
    )
    if seen.scripts:
        print_commands(first.before, first.after, seen.tokens)
        for name, times in sorted(seen.scripts.items(), key=lambda item: -sum(item[1])):
            print(
                f"      script {name:13s} {len(times) / SAMPLE_S:9.1f} calls/s  {sum(times) / len(times):7.1f} us each"
            )


def sample_scripts(client: "sync_redis.Redis[bytes]") -> dict[str, list[int]]:
    """Microseconds of each call of each script over SAMPLE_S, out of Redis' slow log."""
    names = {Script(path.stem).sha: path.stem for path in Path("shared/redis").glob("*/lua/*.lua")}
    client.config_set("slowlog-max-len", 100_000)
    client.config_set("slowlog-log-slower-than", 0)
    time.sleep(SAMPLE_S)
    client.config_set("slowlog-log-slower-than", -1)
    times: dict[str, list[int]] = {}
    for entry in client.slowlog_get(100_000):
        if entry["command"].upper().startswith(b"EVALSHA"):
            times.setdefault(names[entry["command"].split()[1].decode()], []).append(entry["duration"])
    return times


def print_commands(before: Seen, after: Seen, tokens: int) -> None:
    """What Redis was asked, most time first. A script counts as EVALSHA, and its commands by themselves as well."""
    took = after.at - before.at
    rows = []
    for name, (calls, usec) in after.commands.items():
        calls_before, usec_before = before.commands.get(name, (0, 0))
        rows.append((usec - usec_before, calls - calls_before, name))
    for usec, calls, name in sorted(rows, reverse=True)[:14]:
        if calls:
            per_thousand = f"{1000 * calls / tokens:8.2f} per 1,000 tokens  " if tokens else ""
            print(
                f"      {name:20s} {calls / took:9.1f} calls/s  {per_thousand}{usec / calls:7.1f} us each  "
                f"{usec / took / 1e4:6.2f}% of a core"
            )


def main() -> int:
    """Run the levels one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--apis", type=int, nargs="+", default=[2])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=20)
    parser.add_argument("--tokens-per-s", type=float, default=0, help="lengthen the step to keep this total; 0: do not")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--fill", type=float, default=1.15, help="streams in flight over rows; 0: nobody asks anything")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--processes", type=int, default=2, help="of simulated workers, and as many of apis")
    parser.add_argument("--commands", action="store_true")
    chosen = parser.parse_args()
    print(HEADER)
    for apis, workers in itertools.product(chosen.apis, chosen.workers):
        step_s = chosen.step_ms / 1000
        if chosen.tokens_per_s:
            step_s = workers * chosen.rows / chosen.tokens_per_s
        level = Level(workers, apis, chosen.rows, step_s, chosen.prompt, chosen.tokens, chosen.fill)
        show(measure(level, chosen.seconds, chosen.processes, chosen.commands))
    return 0


if __name__ == "__main__":
    sys.exit(main())
