"""Decode speed of the engine against mlx-lm's own BatchGenerator, as ratios: `python -m tests.bench.engine`.

Both run in turn in one process on the same model, so a ratio holds whatever else the machine does. Stock gets one
sampler per row, as mlx-lm's server gives it; the engine reports log-probabilities besides.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, load_model
from shared.sequences import SamplingParams, SequenceSpec
from tests.engine.small_models import QWEN3_BENCH, TINY_SHAPE, write_model
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest

PROMPT, TOKENS, ROUNDS = 32, 64, 5
GREEDY: list[dict[str, Any]] = [{"temperature": 0.0}]
PLAIN: list[dict[str, Any]] = [{"temperature": 1.0}]
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
]
PENALTIES: list[dict[str, Any]] = [{"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3}]
SAMPLINGS = {"greedy": GREEDY, "temperature 1": PLAIN, "mixed": MIXED}


def prompts(rows: int) -> list[list[int]]:
    """Random ids."""
    ids: list[list[int]] = mx.random.randint(0, 256, (rows, PROMPT), key=mx.random.key(1)).tolist()  # type: ignore[assignment]
    return ids


def stock(loaded: LoadedModel, rows: int, samplings: list[dict[str, Any]]) -> float:
    """Tokens per second of BatchGenerator with its own samplers."""
    names = {"temperature": "temp"}
    each = [samplings[index % len(samplings)] for index in range(rows)]
    samplers = [make_sampler(**{names.get(k, k): v for k, v in s.items()}) for s in each]
    generator = BatchGenerator(loaded.model, completion_batch_size=max(32, rows), prefill_batch_size=8)
    generator.insert(prompts(rows), [TOKENS] * rows, samplers=None if samplings is GREEDY else samplers)
    started, tokens = time.perf_counter(), 0
    while True:
        prefilled, responses = generator.next()
        if not prefilled and not responses:
            return tokens / (time.perf_counter() - started)
        tokens += len(responses)


def ours(loaded: LoadedModel, rows: int, samplings: list[dict[str, Any]]) -> float:
    """Tokens per second of the engine."""
    engine = Engine(loaded, EngineConfig("", max_rows=max(32, rows), prefill_rows=8, prefill_chunk=4096))
    params = [SamplingParams(TOKENS, seed, ignore_eos=True, **samplings[seed % len(samplings)]) for seed in range(rows)]
    specs = [SequenceSpec(str(at), "m", tuple(ids), params[at]) for at, ids in enumerate(prompts(rows))]
    started, tokens = time.perf_counter(), 0
    engine.submit([RowRequest(spec) for spec in specs])
    while engine.busy:
        tokens += sum(len(event.tokens) for event in engine.turn().events)
    assert tokens == rows * TOKENS
    return tokens / (time.perf_counter() - started)


def stock_staggered(loaded: LoadedModel, rows: int, together: int) -> float:
    """Tokens per second of BatchGenerator when so many greedy rows arrive at each step."""
    generator = BatchGenerator(loaded.model, completion_batch_size=rows, prefill_batch_size=32)
    waiting, started, tokens = ragged(rows), time.perf_counter(), 0
    while True:
        if waiting:
            arrived, waiting = waiting[:together], waiting[together:]
            generator.insert(arrived, [TOKENS] * len(arrived))
        prefilled, responses = generator.next()
        if not (prefilled or responses or waiting):
            return tokens / (time.perf_counter() - started)
        tokens += len(responses)


def ours_staggered(loaded: LoadedModel, rows: int, together: int) -> float:
    """The same of the engine."""
    engine = Engine(loaded, EngineConfig("", max_rows=rows, prefill_rows=rows, prefill_chunk=16_384))
    params = SamplingParams(TOKENS, 0, temperature=0.0, ignore_eos=True)
    waiting = [RowRequest(SequenceSpec(str(at), "m", tuple(ids), params)) for at, ids in enumerate(ragged(rows))]
    started, tokens = time.perf_counter(), 0
    while waiting or engine.busy:
        arrived, waiting = waiting[:together], waiting[together:]
        engine.submit(arrived)
        tokens += sum(len(event.tokens) for event in engine.turn().events)
    assert tokens == rows * TOKENS
    return tokens / (time.perf_counter() - started)


def ragged(rows: int) -> list[list[int]]:
    """Random ids, a little more or fewer for each row."""
    return [(ids * 2)[: PROMPT + 7 * (row % 4)] for row, ids in enumerate(prompts(rows))]


def compare(name: str, first: Callable[[], float], second: Callable[[], float], rounds: int) -> None:
    """Print second / first as min-median-max of interleaved runs."""
    first(), second()
    pairs = [(first(), second()) for _ in range(rounds)]
    ratios = sorted(after / before for before, after in pairs)
    speeds = median(before for before, _ in pairs), median(after for _, after in pairs)
    print(
        f"{name:44s} {ratios[0]:.2f}-{median(ratios):.2f}-{ratios[-1]:.2f}   "
        f"({speeds[0]:,.0f} -> {speeds[1]:,.0f} tok/s)",
        flush=True,
    )


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--model", action="append", default=[], help="model folders instead of the random ones")
    args = parser.parse_args()
    print(f"{mx.default_device()}, engine / stock, min-median-max of {args.rounds}")
    with tempfile.TemporaryDirectory() as folder:
        models = args.model
        if not models:
            write_model(Path(folder) / "tiny", TINY_SHAPE)
            write_model(Path(folder) / "qwen3", QWEN3_BENCH)
            models = [f"{folder}/tiny", f"{folder}/qwen3"]
        for path in models:
            name, loaded = Path(path).name, load_model(EngineConfig(path))
            loaded = replace(loaded, kv_limit_bytes=1 << 40)
            for rows in args.rows:
                for title, samplings in SAMPLINGS.items():
                    compare(
                        f"{name}, {rows} rows, {title}",
                        lambda loaded=loaded, rows=rows, s=samplings: stock(loaded, rows, s),
                        lambda loaded=loaded, rows=rows, s=samplings: ours(loaded, rows, s),
                        args.rounds,
                    )
                compare(
                    f"{name}, {rows} rows, {max(1, rows // 8)} arrive at each step",
                    lambda loaded=loaded, rows=rows: stock_staggered(loaded, rows, max(1, rows // 8)),
                    lambda loaded=loaded, rows=rows: ours_staggered(loaded, rows, max(1, rows // 8)),
                    args.rounds,
                )
                compare(
                    f"{name}, {rows} rows, penalties / temperature 1",
                    lambda loaded=loaded, rows=rows: ours(loaded, rows, PLAIN),
                    lambda loaded=loaded, rows=rows: ours(loaded, rows, PENALTIES),
                    args.rounds,
                )


if __name__ == "__main__":
    main()
