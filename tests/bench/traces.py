"""What OpenTelemetry traces cost: `python -m tests.bench.traces [--rounds 7] [--requests 400] [--streams 16]`.

Four rings with the tiny model take turns in one run: one that cannot import the SDK, one that could and has traces off,
one that keeps one trace in ten, one that keeps all. A round sends short requests (one token, 8 at a time), where a span
weighs most, and then long streams. CPU is that of the api process and of the worker; ratios are to the ring with traces
off, in the same round. First, in this process, what the calls cost that stand on a request's way: the least of 20.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import psutil

from api.generation.sequences import Sequences
from api.generation.tracing import WorkSpan
from shared.frames import Finish, TokenEvent
from shared.sequences import Claim, SamplingParams, SequenceResult, SequenceSpec, Timings
from shared.telemetry import tracing
from tests.bench.load import load, stream_once
from tests.e2e.rings import MODEL, ring
from worker.reports import trace_sequence

TOKENS = 256
CALLS = 2000
BLOCKED = "import sys\nsys.modules.update({'opentelemetry.sdk': None, 'opentelemetry.exporter': None})\n"


@dataclass
class Side:
    """One ring."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    url: str = ""
    processes: tuple[psutil.Process, ...] = ()  # api and worker

    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.processes)


@dataclass
class Round:
    requests_per_s: float
    request_cpu_us: float
    tokens_per_s: float
    token_cpu_us: float


class Sink(BaseHTTPRequestHandler):
    """A collector that throws away what it gets: what it does with spans is not our cost."""

    taken = 0

    def do_POST(self) -> None:
        Sink.taken += len(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def sides(folder: Path, collector: str) -> list[Side]:
    (folder / "sitecustomize.py").write_text(BLOCKED)
    on = ["--otlp-endpoint", collector]
    tenth = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"}
    wide = {"OTEL_BSP_MAX_QUEUE_SIZE": "100000"}
    return [
        Side("packages absent", [], {"PYTHONPATH": str(folder)}),
        Side("off", [], {}),
        Side("one in ten", on, {**wide, **tenth}),
        Side("all", on, wide),
    ]


@contextlib.contextmanager
def running(side: Side) -> Iterator[None]:
    environment = {**side.environment, "PARALLM_LOG_LEVEL": "WARNING"}
    with tempfile.TemporaryDirectory() as place, ring(Path(place), *side.arguments, environment=environment) as served:
        side.url = served.url
        children = psutil.Process(served.server.popen.pid).children()
        side.processes = tuple(child for child in children if child.cmdline()[1:3] in (["-m", "api"], ["-m", "worker"]))
        assert len(side.processes) == 2, [child.cmdline() for child in children]
        yield


async def measure(side: Side, requests: int, streams: int) -> Round:
    body: dict[str, Any] = {"model": MODEL, "prompt": "12+35=", "max_tokens": 1, "ignore_eos": True, "temperature": 0}

    async def client() -> None:
        for _ in range(requests // 8):
            await stream_once(side.url, "/v1/completions", body)

    cpu, began = side.cpu_s(), asyncio.get_running_loop().time()
    await asyncio.gather(*(client() for _ in range(8)))
    took, request_cpu = asyncio.get_running_loop().time() - began, side.cpu_s() - cpu
    cpu = side.cpu_s()
    figures = await load(side.url, "/v1/completions", [{**body, "max_tokens": TOKENS}] * streams)
    tokens = streams * TOKENS
    return Round(
        requests / took, 1e6 * request_cpu / requests, tokens / figures.took_s, 1e6 * (side.cpu_s() - cpu) / tokens
    )


def calls(collector: str) -> None:
    """Microseconds of a request's calls, alone: those of its span in the api, those of its sequence in the worker."""
    spec = SequenceSpec("s", MODEL, (1,) * 64, SamplingParams(64, 0))
    result = SequenceResult("s", Finish("length"), "w", 1, 64, (7,) * 64, timings=Timings(1_000, 1_010, 1_040, 1_100))
    work = Sequences(SequenceSpec("cmpl-1", MODEL, (), SamplingParams(64, 0)), ((1,) * 64,))
    last = TokenEvent("s", 1, 63, [7], [0.0], finish=Finish("length"))

    def request(trace: str) -> None:
        span = WorkSpan.begin(work)
        if span is not None:
            span.heard(last)
            span.end()
        trace_sequence(Claim(msgspec.structs.replace(spec, trace=trace), "stream", "0-1", 1), result)

    def least(times: int) -> float:
        took = []
        for _ in range(20):
            began = time.perf_counter()
            for _ in range(times):
                with tracing.span("request"):  # FastAPI's, in an api process
                    request(tracing.traceparent())
            took.append((time.perf_counter() - began) / times)
        return 1e6 * min(took)

    off = least(CALLS)
    os.environ["OTEL_BSP_MAX_QUEUE_SIZE"] = "100000"
    tracing.start(collector, "api")
    on = least(CALLS // 10)
    tracing.stop()
    print(f"calls of one request: {off:.1f} us off, {on:.0f} us on (6 spans, their export not counted)", flush=True)


def show(rounds: dict[str, list[Round]]) -> None:
    print("\nratio to `off`, min median max; requests of one token: rate, CPU; streams: tok/s, CPU a token")
    for name, found in rounds.items():
        cells = []
        for field in ("requests_per_s", "request_cpu_us", "tokens_per_s", "token_cpu_us"):
            ratios = sorted(getattr(a, field) / getattr(b, field) for a, b in zip(found, rounds["off"], strict=True))
            middle = statistics.median(getattr(each, field) for each in found)
            cells.append(f"{ratios[0]:.2f} {statistics.median(ratios):.2f} {ratios[-1]:.2f} ({middle:,.0f})")
        print(f"{name:16}", " | ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--streams", type=int, default=16)
    chosen = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    calls(f"http://127.0.0.1:{server.server_port}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        taking_part = sides(folder, f"http://127.0.0.1:{server.server_port}")
        for side in taking_part:
            stack.enter_context(running(side))
        rounds: dict[str, list[Round]] = {side.name: [] for side in taking_part}
        for side in taking_part:
            asyncio.run(measure(side, min(80, chosen.requests), min(4, chosen.streams)))  # warm
        for at in range(chosen.rounds):
            try:
                found = {
                    side.name: asyncio.run(measure(side, chosen.requests, chosen.streams))
                    for side in (taking_part if at % 2 else taking_part[::-1])
                }
            except RuntimeError as error:  # a machine with too much else to do
                print(f"round {at + 1} does not count: {error}", flush=True)
                continue
            for name, figures in found.items():
                rounds[name].append(figures)
            print(f"round {at + 1}: {psutil.getloadavg()[0]:.1f} load", flush=True)
        show(rounds)
    print(f"{Sink.taken / 1e6:.1f} MB of spans")


if __name__ == "__main__":
    main()
