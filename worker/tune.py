"""Measures one model on this machine, for `mlx_parallm doctor --tune`, and writes the file that workers read.

`python -m worker.tune --model M` prints each measurement when it is made, on stderr, and the whole as JSON on stdout.
Nothing else should compute meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, TypeVar

from mlx_model import fast_blas

fast_blas.install()

import mlx.core as mx  # noqa: E402  # after the faster BLAS
import msgspec  # noqa: E402

from mlx_model.config import EngineConfig  # noqa: E402
from mlx_model.device import backend  # noqa: E402
from mlx_model.joined import JoinedLinears, join  # noqa: E402
from mlx_model.kv.layout import packed_times  # noqa: E402
from mlx_model.loader import LoadedModel, load_model  # noqa: E402
from mlx_model.lora.layers import padded_rank  # noqa: E402
from mlx_model.lora.stacks import Shape, timed_kernels  # noqa: E402
from mlx_model.sampling.draw import nucleus_by_halving, nucleus_threshold  # noqa: E402
from mlx_model.sites import Site, find_sites, shared_inputs  # noqa: E402
from mlx_model.step.product import Padding, padded  # noqa: E402
from mlx_model.tuned import ModelTuning, tuned_file, write_tuned  # noqa: E402
from shared.errors import SetupError  # noqa: E402
from worker.engine.batch.adapters import NoAdapters  # noqa: E402
from worker.engine.between_steps import Work  # noqa: E402
from worker.engine.warm_up import SIZES, USUAL_PROMPT, largest_chunk, largest_width, timed_forward  # noqa: E402

T = TypeVar("T")

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32)  # of products
RANK = padded_rank(16)  # of adapters
KV_BITS = (8, 4)
JOINED_ROWS, NUCLEUS_ROWS = 8, 32
GAIN = 0.9  # of its time that a linear may take at most with more rows, to have them
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
    linears, dtype = _first_linears(loaded), getattr(mx, loaded.card.dtype)
    bare = [site.module for site in linears]
    products, padding = _products(max(linears, key=lambda each: each.held_outputs), dtype)
    say("a linear by rows, us: " + _in_microseconds(products))
    say("rows that are filled up to more: " + (", ".join(f"{a} to {b}" for a, b in padding.items()) or "none"))
    joined = _joined(bare, linears[0].held_inputs, dtype)
    say("linears of one input, us: " + (_in_microseconds(joined) or "they cannot be joined"))
    outputs = tuple(site.held_outputs for site in linears)
    lora = {str(k): s for k, s in timed_kernels(Shape(linears[0].held_inputs, outputs, RANK, dtype)).items()}
    say("linears with adapters, us: " + _in_microseconds(lora))
    kv = {bits: times for bits in KV_BITS if (times := packed_times(loaded.model, bits))}
    for bits, times in kv.items():
        say(f"attention over KV of {bits} bits, us: " + _in_microseconds(times))
    nucleus = _nucleus(loaded.card.vocab_size)
    say(f"top_p of {NUCLEUS_ROWS} rows, us: " + _in_microseconds(nucleus))
    return ModelTuning(
        loaded.card.name, chunk, width, by_size, products, padding, joined, lora, kv, nucleus
    )  # fmt: skip


def _in_microseconds(times: Mapping[Any, float]) -> str:
    return ", ".join(f"{way} {seconds * 1e6:.0f}" for way, seconds in times.items())


def _first_linears(loaded: LoadedModel) -> list[Site]:
    """The first linears of the model that read one input, q, k and v as a rule."""
    sites = find_sites(loaded.model)
    groups = (group for group in shared_inputs(loaded.model, sites) if sites[group[0]].kind == "linear")
    return [sites[path] for path in next(groups)]


def _seconds(x: mx.array, of: Callable[[mx.array], mx.array]) -> float:
    """Least time of one call, of several of which each one waits for the one before it, as layers do."""
    best = float("inf")
    for _ in range(ROUNDS):
        each = x
        mx.eval(each)
        began = time.perf_counter()
        for _ in range(CALLS):
            each = each + 0 * of(each)[..., :1]
        mx.eval(each)
        best = min(best, (time.perf_counter() - began) / CALLS)
    return best


def _products(site: Site, dtype: mx.Dtype) -> tuple[dict[int, float], dict[int, int]]:
    """Seconds of a linear by rows; and if it is quantised, rows that are fewer and slower than others."""
    xs = {rows: mx.full((rows, site.held_inputs), 1e-3, dtype) for rows in ROWS}
    times = {rows: _seconds(x, site.module) for rows, x in xs.items()}
    filled: dict[int, int] = {}
    for rows, x in xs.items() if "scales" in site.module else ():
        best = GAIN * times[rows]
        for more in (each for each in ROWS if each > rows and times[each] < best):
            pairs: Padding = ((rows, more),)
            took = _seconds(x, lambda x, pairs=pairs: site.module(padded(x, pairs))[: x.shape[0]])  # type: ignore[misc]
            again = GAIN * _seconds(x, site.module)  # another program may have computed meanwhile
            if took < min(best, again):
                filled[rows], best = more, took
    return times, filled


def _joined(linears: Sequence[Any], inputs: int, dtype: mx.Dtype) -> dict[str, float]:
    """Seconds of linears apart, and of copies of them that are one product; {} where they cannot be one."""
    copies = [copy(each) for each in linears]
    join(copies)
    joined: JoinedLinears | None = getattr(copies[0], "joined", None)
    if joined is None:
        return {}
    x = mx.full((JOINED_ROWS, inputs), 1e-3, dtype)

    def apart(x: mx.array) -> mx.array:
        return mx.concatenate([each(x)[..., :1] for each in linears], axis=-1)

    def as_one(x: mx.array) -> mx.array:
        return mx.concatenate([joined.output(at, x)[..., :1] for at in range(len(copies))], axis=-1)

    return {"apart": _seconds(x, apart), "joined": _seconds(x, as_one)}


def _nucleus(vocab: int) -> dict[str, float]:
    """Seconds of a threshold of top_p by each way to find it among all tokens."""
    scores = 2 * mx.random.normal((NUCLEUS_ROWS, vocab), key=mx.random.key(0))
    chances, top_p = mx.softmax(scores, axis=-1), mx.full((NUCLEUS_ROWS, 1), 0.95)
    ways: dict[str, Callable[[mx.array], mx.array]] = {
        "sorted": lambda chances: nucleus_threshold(chances, None, top_p, vocab)[0],
        "halved": lambda chances: nucleus_by_halving(chances, None, top_p),
    }
    return {way: _seconds(chances, of) for way, of in ways.items()}


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
