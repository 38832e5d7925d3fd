"""Served output tok/s, time to first token and between tokens over HTTP, against raw mlx-lm and `mlx_lm.server`.

`python -m tests.bench.served [--rounds 5] [--streams 1 8 32] [--models qwen3-small tiny qwen3-0.6b qwen3-4b]`. All
sides take turns in one run on the same model and prompts: 64 tokens in, 64 out, greedy, end-of-sequence ignored where
the side can. Only ratios within a run mean something; machines are noisy. On a GPU, say:
`--models qwen3-0.6b --dtype bfloat16 --prompt 128 --tokens 128 --streams 1 32 128 --no-peer`.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from api.serve.embedded_redis import free_port
from tests.bench.load import LoadFigures, load
from tests.bench.models import QWEN3_0_6B, QWEN3_4B, QWEN3_SMALL, random_qwen3
from tests.e2e.rings import ring
from tests.waiting import wait_until

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 64
SHAPES = {"qwen3-small": QWEN3_SMALL, "qwen3-0.6b": QWEN3_0_6B, "qwen3-4b": QWEN3_4B}


class Raw:
    """`mlx_lm.batch_generate` in a process of its own."""

    def __init__(self, model: Path, tokens: int, dtype: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.peers", "rate", str(model), str(tokens), dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tokens_per_s(self, prompts: list[list[int]]) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["tokens"] / answer["s"]

    def stop(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def prompts_of(count: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(4, min(vocabulary, 440)) for _ in range(tokens)] for _ in range(count)]


def our_bodies(model: str, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    common = {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return [{**common, "prompt": prompt} for prompt in prompts]


def peer_bodies(texts: list[str], tokens: int) -> list[dict[str, Any]]:
    return [{"prompt": text, "max_tokens": tokens, "temperature": 0} for text in texts]


def start_peer(model: Path) -> tuple["subprocess.Popen[bytes]", str]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.peers", "serve", str(model), str(port)], stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            httpx.get(f"{url}/v1/models", timeout=2)
            return process, url
        except httpx.HTTPError:
            threading.Event().wait(0.1)
    raise SystemExit("mlx_lm.server did not start")


def spread(values: list[float]) -> str:
    return f"{min(values):.2f} {statistics.median(values):.2f} {max(values):.2f}" if values else "none"


def at(values: list[float], percent: float) -> float:
    return values[min(len(values) - 1, int(len(values) * percent / 100))] if values else math.nan


def decode_prompts(model: Path, prompts: list[list[int]]) -> list[str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [tokenizer.decode(prompt) for prompt in prompts]


class Peer:
    """`mlx_lm.server`, when it takes part."""

    def __init__(self, model: Path, tokens: int, takes_part: bool) -> None:
        self._model, self._tokens = model, tokens
        self._process, self._url = start_peer(model) if takes_part else (None, "")

    async def load(self, prompts: list[list[int]]) -> LoadFigures | None:
        if self._process is None:
            return None
        bodies = peer_bodies(decode_prompts(self._model, prompts), self._tokens)
        return await load(self._url, "/v1/completions", bodies)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


async def measure(name: str, model: Path, url: str, arguments: argparse.Namespace) -> None:
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    if arguments.first_burst:
        await first_burst(name, model, url, arguments, vocabulary)
    await warm(url)
    raw = Raw(model, arguments.tokens, arguments.dtype)
    peer = Peer(model, arguments.tokens, takes_part=not arguments.no_peer)
    try:
        for count in arguments.streams:
            turns: list[Turn] = []
            for turn in range(-1, arguments.rounds):
                prompts = prompts_of(count, arguments.prompt, vocabulary, seed=count * 1000 + turn)
                raw_rate = await asyncio.to_thread(raw.tokens_per_s, prompts)
                our = await load(url, "/v1/completions", our_bodies(model.name, prompts, arguments.tokens))
                their = await peer.load(prompts)
                if turn >= 0:  # the first turn warms all sides up
                    turns.append(Turn(raw_rate, our, their))
            print(f"{name:14s} {count:3d} streams | {report(turns)}", flush=True)
    finally:
        raw.stop()
        peer.stop()


async def warm(url: str) -> None:
    """Once the worker has compiled what it compiles while it is idle: the other sides compute then, too."""
    async with httpx.AsyncClient(timeout=60) as client:

        async def is_warm() -> bool:
            health = (await client.get(f"{url}/health")).json()
            return not any(worker["warms_up"] for worker in health["workers"])

        await wait_until(is_warm)


async def first_burst(name: str, model: Path, url: str, arguments: argparse.Namespace, vocabulary: int) -> None:
    """The first requests that a fresh worker gets, all at once; then as many again."""
    for turn in ("first burst", "second"):
        prompts = prompts_of(arguments.first_burst, arguments.prompt, vocabulary, seed=len(turn))
        burst = await load(url, "/v1/completions", our_bodies(model.name, prompts, arguments.tokens))
        first = burst.first_token_ms
        print(
            f"{name:14s} {arguments.first_burst:3d} streams | {turn} after ready: first token p50/max "
            f"{at(first, 50):.0f}/{first[-1]:.0f} ms, {burst.tokens_per_s:.0f} tok/s",
            flush=True,
        )


@dataclass(frozen=True)
class Turn:
    """One round: raw tok/s, our figures, the peer's."""

    raw: float
    ours: LoadFigures
    peer: LoadFigures | None


def report(turns: list[Turn]) -> str:
    raw = statistics.median(turn.raw for turn in turns)
    sides = [f"raw {raw:7.0f} tok/s", "ours" + side(turns, [turn.ours for turn in turns])]
    peers = [turn.peer for turn in turns if turn.peer]
    if peers:
        sides.append("mlx_lm.server" + side(turns, peers))
    return " | ".join(sides)


def side(turns: list[Turn], figures: list[LoadFigures]) -> str:
    ratios = [one.tokens_per_s / turn.raw for one, turn in zip(figures, turns, strict=True)]
    first = sorted(ms for one in figures for ms in one.first_token_ms)
    gaps = sorted(1000 * gap for one in figures for stream in one.streams for gap in stream.gaps_s)
    rate = statistics.median(one.tokens_per_s for one in figures)
    return (
        f"/raw {spread(ratios)} ({rate:.0f} tok/s), first token p50/p99 "
        f"{at(first, 50):.1f}/{at(first, 99):.1f} ms, between {at(gaps, 50):.1f}/{at(gaps, 99):.1f} ms"
    )


@contextmanager
def serving(name: str, dtype: str, rows: int, *flags: str) -> Iterator[tuple[Path, str]]:
    """A server of its own with models/tiny, or with a random model of this shape: the model's folder and the URL."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path("models/tiny") if name == "tiny" else random_qwen3(Path(folder) / name, SHAPES[name], dtype)
        settings = ("--dtype", dtype, "--max-batch-size", str(rows), *flags)
        with ring(Path(folder) / "data", *settings, model=model) as started:
            yield model, started.url


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.served", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=OUTPUT_TOKENS, help="output tokens a stream")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--first-burst", type=int, default=0, help="streams of a first burst, right after ready; 0: none"
    )
    parser.add_argument("--no-peer", action="store_true", help="without mlx_lm.server")
    parser.add_argument("--serve", action="append", default=[], help="one more flag for mlx_parallm_serve")
    parser.add_argument("--models", nargs="+", default=["qwen3-small", "tiny"])
    arguments = parser.parse_args()
    print("ratios are min median max over the rounds of this run", flush=True)
    rows = max(32, arguments.first_burst, *arguments.streams)
    for name in arguments.models:
        with serving(name, arguments.dtype, rows, *arguments.serve) as (model, url):
            asyncio.run(measure(name, model, url, arguments))


if __name__ == "__main__":
    main()
