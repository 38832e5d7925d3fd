"""Served output tok/s and time to first token over HTTP, against raw mlx-lm in process and `mlx_lm.server` beside it.

`python -m tests.bench.served [--rounds 5] [--streams 1 8 32]`. All sides take turns in one run on the same model and
prompts: 64 tokens in, 64 out, greedy, end-of-sequence ignored where the side can. Only ratios within a
run mean something; machines are noisy.
"""

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx

from tests.bench.load import LoadFigures, load
from tests.bench.models import QWEN3_SMALL, random_qwen3
from tests.e2e.rings import Process

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 64
RAW = """
import json, sys, time
from worker.engine import fast_blas
fast_blas.install()
import mlx.core as mx
from mlx_lm import batch_generate, load
model, tokenizer = load(sys.argv[1])
model.set_dtype(mx.float32)
tokenizer._eos_token_ids = set()
for line in sys.stdin:
    prompts = json.loads(line)
    began = time.perf_counter()
    response = batch_generate(model, tokenizer, prompts, max_tokens=int(sys.argv[2]))
    print(json.dumps({"tokens": response.stats.generation_tokens, "s": time.perf_counter() - began}), flush=True)
"""
PEER = """
import sys
from worker.engine import fast_blas
fast_blas.install()
import mlx_lm.server
sys.argv = ["mlx_lm.server", "--model", sys.argv[1], "--port", sys.argv[2], "--decode-concurrency", "32",
            "--prompt-concurrency", "8", "--log-level", "ERROR"]
mlx_lm.server.main()
"""


class Raw:
    """`mlx_lm.batch_generate` in a process of its own."""

    def __init__(self, model: Path, tokens: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", RAW, str(model), str(tokens)],
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


def prompts_of(count: int, vocabulary: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(4, min(vocabulary, 440)) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def our_bodies(model: str, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    common = {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return [{**common, "prompt": prompt} for prompt in prompts]


def peer_bodies(texts: list[str], tokens: int) -> list[dict[str, Any]]:
    return [{"prompt": text, "max_tokens": tokens, "temperature": 0} for text in texts]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def start_peer(model: Path) -> tuple["subprocess.Popen[bytes]", str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", PEER, str(model), str(port)], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            httpx.get(f"{url}/v1/models", timeout=2)
            return process, url
        except httpx.HTTPError:
            threading.Event().wait(0.1)
    raise SystemExit("mlx_lm.server did not start")


def spread(values: list[float]) -> str:
    return f"{min(values):.2f} {statistics.median(values):.2f} {max(values):.2f}"


def at(values: list[float], percent: float) -> float:
    return values[min(len(values) - 1, int(len(values) * percent / 100))]


def decode_prompts(model: Path, prompts: list[list[int]]) -> list[str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [tokenizer.decode(prompt) for prompt in prompts]


async def measure(name: str, model: Path, url: str, arguments: argparse.Namespace) -> None:
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    raw = Raw(model, arguments.tokens)
    peer, peer_url = start_peer(model)
    try:
        for count in arguments.streams:
            raw_rates: list[float] = []
            ours: list[LoadFigures] = []
            theirs: list[LoadFigures] = []
            for turn in range(-1, arguments.rounds):
                prompts = prompts_of(count, vocabulary, seed=count * 1000 + turn)
                raw_rate = await asyncio.to_thread(raw.tokens_per_s, prompts)
                our = await load(url, "/v1/completions", our_bodies(model.name, prompts, arguments.tokens))
                their = await load(
                    peer_url, "/v1/completions", peer_bodies(decode_prompts(model, prompts), arguments.tokens)
                )
                if turn >= 0:  # the first turn warms all sides up
                    raw_rates.append(raw_rate)
                    ours.append(our)
                    theirs.append(their)
            show(name, count, raw_rates, ours, theirs)
    finally:
        raw.stop()
        peer.terminate()
        peer.wait()


def show(name: str, count: int, raw: list[float], ours: list[LoadFigures], theirs: list[LoadFigures]) -> None:
    our_ratio = [figures.tokens_per_s / rate for figures, rate in zip(ours, raw, strict=True)]
    their_ratio = [figures.tokens_per_s / rate for figures, rate in zip(theirs, raw, strict=True)]
    our_first = sorted(ms for figures in ours for ms in figures.first_token_ms)
    their_first = sorted(ms for figures in theirs for ms in figures.first_token_ms)
    print(
        f"{name:14s} {count:3d} streams | raw {statistics.median(raw):7.0f} tok/s | "
        f"ours/raw {spread(our_ratio)} ({statistics.median(f.tokens_per_s for f in ours):.0f} tok/s), "
        f"first token p50/p99 {at(our_first, 50):.1f}/{at(our_first, 99):.1f} ms | "
        f"mlx_lm.server/raw {spread(their_ratio)}, {at(their_first, 50):.1f}/{at(their_first, 99):.1f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.served", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=OUTPUT_TOKENS, help="output tokens a stream")
    parser.add_argument("--models", nargs="+", default=["qwen3-small", "tiny"])
    arguments = parser.parse_args()
    print("ratios are min median max over the rounds of this run", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            model = Path("models/tiny") if name == "tiny" else random_qwen3(Path(folder) / name, QWEN3_SMALL)
            server = Process.start(
                "api.serve", "--model", str(model), "--port", "0", "--data-dir", f"{folder}/{name}-data",
                "--dtype", "float32",
            )  # fmt: skip
            try:
                url = server.wait_for_line(r"ready: (http://\S+)/v1").group(1)
                asyncio.run(measure(name, model, url, arguments))
            finally:
                server.stop()


if __name__ == "__main__":
    main()
