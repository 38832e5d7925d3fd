"""Measures one model on this machine, for `mlx_parallm doctor --tune`, and writes the file that workers read.

`python -m worker.tune --model M` prints each measurement when it is made, on stderr, and the whole as JSON on stdout.
Nothing else should compute meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mlx_model import fast_blas

fast_blas.install()

import mlx.core as mx  # noqa: E402  # after the faster BLAS
import msgspec  # noqa: E402

from mlx_model.config import EngineConfig  # noqa: E402
from mlx_model.device import backend  # noqa: E402
from mlx_model.kv.layout import packed_times  # noqa: E402
from mlx_model.loader import LoadedModel, load_model  # noqa: E402
from mlx_model.lora.layers import padded_rank  # noqa: E402
from mlx_model.lora.stacks import Shape, timed_kernels  # noqa: E402
from mlx_model.sites import find_sites, shared_inputs  # noqa: E402
from mlx_model.tuned import ModelTuning, tuned_file, write_tuned  # noqa: E402
from shared.errors import SetupError  # noqa: E402
from worker.engine.batch.adapters import NoAdapters  # noqa: E402
from worker.engine.between_steps import Work  # noqa: E402
from worker.engine.warm_up import SIZES, USUAL_PROMPT, largest_chunk, largest_width, timed_forward  # noqa: E402

T = TypeVar("T")

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32)  # of products
RANK = 16  # of adapters
ROUNDS, CALLS = 5, 8


def found(work: Work[T]) -> T:
    """The result of work that is done at once."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def tuned(loaded: LoadedModel, say: Callable[[str], None]) -> ModelTuning:
    """All measurements of a model."""
    sizes, pieces = SIZES[backend()], dict[int, float]()
    timed = timed_forward(loaded, NoAdapters())

    def forward(rows: int, width: int) -> Work[float]:
        seconds = yield from timed(rows, width)
        pieces[rows * width] = seconds
        say(f"prompts of {rows} x {width} tokens: {seconds * 1e3:.1f} ms")
        return seconds

    chunk = found(largest_chunk(forward, *sizes.chunks, sizes.piece_s))
    by_size = dict(sorted(pieces.items()))
    width = found(largest_width(forward, *sizes.chunks, sizes.piece_s)) if backend() == "cuda" else 0
    say(f"a piece of prompts may have {chunk} tokens ({USUAL_PROMPT} of each), in {sizes.piece_s * 1e3:.0f} ms")
    products = _products(loaded)
    say("a linear by rows, us: " + ", ".join(f"{rows}: {seconds * 1e6:.0f}" for rows, seconds in products.items()))
    lora: dict[str, float] = dict(_lora(loaded))
    say("linears with adapters, us: " + _in_microseconds(lora))
    kv = packed_times(loaded.model, 8)
    say("attention over KV of 8 bits, us: " + (_in_microseconds(kv) or "this model's KV is not packed"))
    return ModelTuning(loaded.card.name, chunk, width, by_size, products, lora, kv)


def _in_microseconds(times: dict[str, float]) -> str:
    return ", ".join(f"{way} {seconds * 1e6:.0f}" for way, seconds in times.items())


def _groups(loaded: LoadedModel) -> list[list[str]]:
    sites = find_sites(loaded.model)
    return [group for group in shared_inputs(loaded.model, sites) if sites[group[0]].kind == "linear"]


def _products(loaded: LoadedModel) -> dict[int, float]:
    """Seconds of the widest linear of the first layer, by rows; each call waits for the one before it."""
    sites = find_sites(loaded.model)
    linears = [sites[path] for path in _groups(loaded)[0]]
    site = max(linears, key=lambda each: each.held_outputs)
    times = {}
    for rows in ROWS:
        best = float("inf")
        for _ in range(ROUNDS):
            x = mx.ones((rows, 1, site.held_inputs), getattr(mx, loaded.card.dtype)) * 1e-3
            mx.eval(x)
            began = time.perf_counter()
            for _ in range(CALLS):
                x = x + 0 * site.module(x)[..., :1]
            mx.eval(x)
            best = min(best, (time.perf_counter() - began) / CALLS)
        times[rows] = best
    return times


def _lora(loaded: LoadedModel) -> dict[str, float]:
    sites = find_sites(loaded.model)
    group = [sites[path] for path in _groups(loaded)[0]]
    outputs = tuple(site.held_outputs for site in group)
    times = timed_kernels(Shape(group[0].held_inputs, outputs, padded_rank(RANK), getattr(mx, loaded.card.dtype)))
    return {str(way): seconds for way, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m worker.tune")
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    file = Path(args.out) if args.out else tuned_file()
    if file is None:
        raise SystemExit("error: PARALLM_TUNED=0 says that no measurements are read; give --out FILE")
    try:
        loaded = load_model(EngineConfig(args.model))
    except SetupError as error:
        raise SystemExit(f"error: {error}") from error
    tuning = tuned(loaded, lambda text: print(text, file=sys.stderr, flush=True))
    write_tuned(loaded.card.base_sha256, tuning, file)
    sys.stdout.buffer.write(msgspec.json.encode({"file": str(file), "tuning": tuning}) + b"\n")


if __name__ == "__main__":
    main()
