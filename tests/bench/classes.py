"""First tokens of lone interactive requests, idle and beside a batch that fills the worker.

`python -m tests.bench.classes [--rounds 5] [--models tiny qwen3-small qwen3-0.6b qwen3-4b]`. Idle and saturated
stretches take turns on one ring, so their ratio holds whatever else the machine does; what the batch gets done is
counted with and without interactive requests beside it. `short` batches decode much of short prompts, `long` ones feed
long prompts. On a GPU, say: `--models qwen3-0.6b --dtype bfloat16 --prompt 128 --rows 64`.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.bench.load import stream_once
from tests.bench.served import at, prompts_of, serving, spread

BATCH_TOKENS = 1_000_000  # more than a stretch takes
BATCHES = {"short": (32, 128), "long": (700, 16)}  # tokens of a prompt, and of a completion
RESERVED = 2
PATIENCE_S = 60.0  # for a batch to fill the worker, or to leave it


@dataclass
class Stretch:
    """Interactive requests one after another."""

    first_ms: list[float] = field(default_factory=list)
    rate: float = 0.0  # batch completions a second meanwhile


class Batch:
    """A job that keeps every row that batch work may take."""

    def __init__(self, client: httpx.AsyncClient, model: str, shape: tuple[int, int], rows: int, seed: int) -> None:
        self._client, self._model, self._shape, self._rows, self._seed = client, model, shape, rows, seed

    async def __aenter__(self) -> "Batch":
        prompt, tokens = self._shape
        spec = {"kind": "generate", "model": self._model, "max_tokens": tokens, "ignore_eos": True}
        prompts = prompts_of(BATCH_TOKENS // (prompt + tokens), prompt, 440, self._seed)
        lines = "\n".join(json.dumps({"prompt": ids}) for ids in prompts)
        upload = self._client.post("/v1/jobs", data={"spec": json.dumps(spec)}, files={"file": lines.encode()})
        self._id = (await upload).raise_for_status().json()["id"]
        await self._until(lambda leased: leased >= self._rows - RESERVED, "fill the worker")
        await asyncio.sleep(1)  # past the first prompts
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.post(f"/v1/jobs/{self._id}/cancel")
        await self._until(lambda leased: leased == 0, "leave it")
        await asyncio.sleep(0.5)

    async def _until(self, condition: Callable[[int], bool], what: str) -> None:
        """Wait for the batch's rows; an error says how many there are."""
        until = time.monotonic() + PATIENCE_S
        while not condition(leased := await self._leased()):
            if time.monotonic() > until:
                raise TimeoutError(f"the batch did not {what} within {PATIENCE_S:.0f} s: it has {leased} rows")
            await asyncio.sleep(0.05)

    async def _leased(self) -> int:
        health: Any = (await self._client.get("/health")).json()
        return int(health["models"][self._model]["leased"]["batch"])

    async def done(self) -> int:
        status: Any = (await self._client.get(f"/v1/jobs/{self._id}")).json()
        return int(status["counts"]["succeeded"])


async def requests(url: str, model: str, count: int, prompt: int, seed: int) -> Stretch:
    stretch = Stretch()
    for ids in prompts_of(count, prompt, 440, seed):
        body = {"model": model, "prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        stretch.first_ms.append(1000 * (await stream_once(url, "/v1/completions", body)).first_token_s)
        await asyncio.sleep(0.003 * (len(stretch.first_ms) % 7))  # not in step with the worker's loop
    return stretch


async def measure(url: str, model: str, name: str, options: argparse.Namespace) -> None:
    idle: list[Stretch] = []
    beside: list[Stretch] = []
    alone: list[float] = []
    count, prompt = options.requests, options.prompt
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await requests(url, model, 10, prompt, 1)
        for turn in range(options.rounds):
            idle.append(await requests(url, model, count, prompt, 100 + turn))
            async with Batch(client, model, BATCHES[name], options.rows, turn) as batch:
                before, began = await batch.done(), time.perf_counter()
                stretch = await requests(url, model, count, prompt, 200 + turn)
                middle, then = await batch.done(), time.perf_counter()
                stretch.rate = (middle - before) / (then - began)
                await asyncio.sleep(then - began)
                alone.append((await batch.done() - middle) / (time.perf_counter() - then))
                beside.append(stretch)
            last = f"idle {shown(idle[-1:])}, saturated {shown(beside[-1:])}"
            print(f"{model:12s} beside {name:5s} batch, round {turn + 1} of {options.rounds}: {last}", file=sys.stderr)
    ratios = [middle_of(b) / middle_of(i) for i, b in zip(idle, beside, strict=True)]
    kept = [b.rate / a for a, b in zip(alone, beside, strict=True) if a]
    first = f"first token p50 x {spread(ratios)} | idle {shown(idle)} | saturated {shown(beside)}"
    batch = f"batch keeps {spread(kept)} of {statistics.median(alone):.1f}/s"
    print(f"{model:12s} beside {name:5s} batch | {first} | {batch}", flush=True)


def middle_of(stretch: Stretch) -> float:
    return statistics.median(stretch.first_ms)


def shown(stretches: list[Stretch]) -> str:
    values = sorted(ms for stretch in stretches for ms in stretch.first_ms)
    return f"p50/p90/p99 {at(values, 50):.1f}/{at(values, 90):.1f}/{at(values, 99):.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.classes", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["tiny", "qwen3-small"])
    parser.add_argument("--batches", nargs="+", choices=list(BATCHES), default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40, help="interactive requests of a stretch")
    parser.add_argument("--prompt", type=int, default=40, help="tokens of their prompts")
    parser.add_argument("--rows", type=int, default=32, help="of the worker")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    for name in options.models:
        with serving(name, options.dtype, options.rows) as (model, url):
            for batch in options.batches:
                asyncio.run(measure(url, model.name, batch, options))


if __name__ == "__main__":
    main()
