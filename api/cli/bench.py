"""`mlx_parallm bench`: a small load test of a running server, by streamed completions.

It measures what a client sees: the time to a stream's first event (TTFT), the time between two events (inter-token;
events that come together count as 0), and the time from the first to the last event divided by the tokens between them
(per token). Tokens are counted by the server's own `usage`. All prompts are different random token ids, so that the
prefix cache does not help.
"""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from api.cli.client import DEFAULT_URL, InferenceClient
from api.cli.console import ApiKey, Json, Url, ask, err, out, plain, print_json, progress_bar
from api.cli.http import RequestFailedError

REQUEST_FAILED = 1
TEXT = "The quick brown fox jumps over the lazy dog; 0123456789 + how much wood would a woodchuck chuck? (All of it.)"


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles in milliseconds; None without a measurement."""

    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Percentiles":
        """Percentiles by the method of the nearest rank."""
        ranked = sorted(seconds)
        at = [ranked[math.ceil(share * len(ranked)) - 1] * 1000 if ranked else None for share in (0.50, 0.99)]
        return cls(*(None if value is None else round(value, 3) for value in at))


class Report(msgspec.Struct, frozen=True):
    """The result of a bench."""

    model: str
    streams: int
    requests: int
    failed: int
    took_s: float
    prompt_tokens: int  # of all requests that succeeded, as the server counted them
    completion_tokens: int
    tokens_per_s: float  # completion tokens of all streams together
    ttft_ms: Percentiles
    inter_token_ms: Percentiles
    per_token_ms: Percentiles
    request_ms: Percentiles
    errors: dict[str, int]  # message -> how often


@dataclass
class _Load:
    """The figures, while the streams run; seconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def report(self, model: str, streams: int, requests: int, took_s: float) -> Report:
        """The figures of so many requests."""
        return Report(
            model=model,
            streams=streams,
            requests=requests,
            failed=self.errors.total(),
            took_s=round(took_s, 3),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            tokens_per_s=round(self.completion_tokens / took_s, 1),
            ttft_ms=Percentiles.of(self.first),
            inter_token_ms=Percentiles.of(self.gaps),
            per_token_ms=Percentiles.of(self.paces),
            request_ms=Percentiles.of(self.whole),
            errors=dict(self.errors),
        )


def bench(
    model: Annotated[
        str, typer.Option("--model", "-m", help="model to request; default: the only one that is served")
    ] = "",
    streams: Annotated[int, typer.Option(min=1, help="requests at a time")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="tokens of a prompt")] = 128,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens of a completion; its end token is ignored")] = 128,
    requests: Annotated[int, typer.Option(min=0, help="requests in total; 0: four for each stream")] = 0,
    seed: Annotated[int, typer.Option(help="seed of the prompts")] = 0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """Send load to a running server and print tokens per second and latencies; exit code 1 if a request failed."""
    wanted = requests or 4 * streams

    async def run(client: InferenceClient) -> Report:
        name = model or await client.only_model()
        return await _bench(client, name, streams, prompt_tokens, max_tokens, wanted, seed)

    report = ask(url, api_key, run, connections=streams)
    if as_json:
        print_json(report)
    else:
        _print(report)
    if report.failed:
        raise typer.Exit(REQUEST_FAILED)


async def _bench(
    client: InferenceClient, model: str, streams: int, prompt_tokens: int, max_tokens: int, requests: int, seed: int
) -> Report:
    answer = await client.call("POST", "/tokenize", dict[str, Any], {"model": model, "prompt": TEXT})
    alphabet, draw = sorted(set(answer["tokens"])), random.Random(seed)
    fixed = {"model": model, "max_tokens": max_tokens, "ignore_eos": True, "stream_options": {"include_usage": True}}
    bodies = [fixed | {"prompt": draw.choices(alphabet, k=prompt_tokens)} for _ in range(requests)]
    load, began = _Load(), time.perf_counter()
    with progress_bar("requests", requests) as update:

        async def stream() -> None:
            while bodies:
                await _one(client, bodies.pop(), load)
                update("requests", len(load.whole) + load.errors.total(), requests)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(streams, requests)):
                tasks.create_task(stream())
    return load.report(model, streams, requests, time.perf_counter() - began)


async def _one(client: InferenceClient, body: dict[str, Any], load: _Load) -> None:
    """One streamed request; a failed one counts by its message."""
    began = time.perf_counter()
    events: list[float] = []
    usage: dict[str, int] = {}
    try:
        async for event in client.events("/v1/completions", body):
            if any(choice["text"] or not choice.get("finish_reason") for choice in event["choices"]):
                events.append(time.perf_counter())
            usage = event.get("usage") or usage
    except RequestFailedError as error:
        load.errors[error.message] += 1
        return
    load.whole.append(time.perf_counter() - began)
    load.prompt_tokens += usage.get("prompt_tokens", 0)
    tokens = usage.get("completion_tokens", 0)
    load.completion_tokens += tokens
    if not events:
        return
    load.first.append(events[0] - began)
    load.paces += [(events[-1] - events[0]) / (tokens - 1)] if tokens > 1 else []
    load.gaps += [after - before for before, after in pairwise(events)]


def _print(report: Report) -> None:
    done = f"{report.requests - report.failed} of {report.requests} requests in {report.took_s:.2f} s"
    sizes = f"{report.prompt_tokens} prompt and {report.completion_tokens} completion tokens"
    out.print(f"{report.model}, {report.streams} streams: {done}, {sizes}", markup=False)
    out.print(f"{report.tokens_per_s:.1f} tok/s")
    table = Table("ms", "p50", "p99", box=None)
    spreads = (report.ttft_ms, report.inter_token_ms, report.per_token_ms, report.request_ms)
    for name, spread in zip(("TTFT", "inter-token", "per token", "whole"), spreads, strict=True):
        table.add_row(name, *("-" if value is None else f"{value:.1f}" for value in (spread.p50, spread.p99)))
    out.print(table)
    for message, count in report.errors.items():
        err.print(f"[bold red]failed[/] {count}:", plain(message))
