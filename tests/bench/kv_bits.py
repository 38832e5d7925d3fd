"""KV in 8 and 4 bits over full precision: `python -m tests.bench.kv_bits [--shape small|medium|deep|0.6b|4b]`.

Memory: bytes of KV that a batch of rows of 2,048 positions holds, over bfloat16, whatever the machine. Speed: decode
steps of rows with a long context behind them (samples of one prompt), full precision and quantised in turn in one
process, as ratios.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import time
from dataclasses import replace
from statistics import median

import mlx.core as mx

from mlx_model.config import EngineConfig
from mlx_model.kv.kinds import leaves
from mlx_model.kv.layout import layout_of
from mlx_model.loader import LoadedModel
from shared.sequences import SamplingParams, SequenceSpec
from tests.bench.adapters import SHAPES, random_model
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest

BITS = (8, 4)
AIMS = {8: "aim: memory at least 1.8, speed at least 0.95 (32 rows of 2,048 on an H200)", 4: ""}
STEPS = 24
COUNTED_AT = 2048  # positions of the rows whose bytes are compared


class Decoding:
    """Rows of one engine, past their prompts."""

    def __init__(self, loaded: LoadedModel, rows: int, context: int) -> None:
        config = EngineConfig("", max_rows=rows, prefill_chunk=256, prefix_cache_bytes=0)
        self._engine = Engine(loaded, config)
        params = SamplingParams(4 * STEPS, 0, temperature=0.0, ignore_eos=True)
        prompt = tuple(3 + 7919 * at % 4000 for at in range(context))
        self._engine.submit([RowRequest(SequenceSpec(str(at), "m", prompt, params)) for at in range(rows)])
        decoded = 0
        while decoded < 3 * rows:  # the first step copies what the rows share
            decoded += self._tokens()

    def _tokens(self) -> int:
        tokens = sum(len(event.tokens) for event in self._engine.turn().events)
        self._engine.settle()
        return tokens

    @property
    def bytes(self) -> int:
        """Of the batch's KV."""
        return sum(leaf.nbytes for leaf in leaves(self._engine._batch._cache[:-1]))

    def tokens_per_s(self) -> float:
        """Over some decode steps."""
        began = time.perf_counter()
        tokens = sum(self._tokens() for _ in range(STEPS))
        return tokens / (time.perf_counter() - began)


def layouts(loaded: LoadedModel, group_size: int) -> dict[int, LoadedModel]:
    """The same model with each way to keep KV, by bits; 0: its dtype."""
    return {bits: replace(loaded, kv=layout_of(loaded.model, bits, group_size)) for bits in (0, *BITS)}


def main() -> None:
    """Memory, then speed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="medium")
    parser.add_argument("--rows", type=int, action="append", help="default: 8 and 32")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    parser.add_argument("--dtype", default="float32" if on_cpu else "bfloat16", help="of the speed part")
    args = parser.parse_args()
    shape = SHAPES[args.shape] | {"head_dim": max(args.group_size, SHAPES[args.shape]["head_dim"])}
    brief = shape | {"num_hidden_layers": 2}
    held = {
        bits: Decoding(each, 4, COUNTED_AT).bytes
        for bits, each in layouts(random_model(brief, "bfloat16"), args.group_size).items()
    }
    for bits in BITS:
        rows = f"{held[0] / held[bits]:.2f} times as many rows of {COUNTED_AT:,}"
        print(f"{bits} bits: {rows} in the same memory as in bfloat16")
    models = layouts(random_model(shape, args.dtype), args.group_size)
    for rows in args.rows or (8, 32):
        speeds: dict[int, list[float]] = {bits: [] for bits in models}
        for _ in range(args.rounds):
            for bits, loaded in models.items():
                speeds[bits].append(Decoding(loaded, rows, args.context).tokens_per_s())
        for bits in BITS:
            ratios = sorted(one / full for one, full in zip(speeds[bits], speeds[0], strict=True))
            print(
                f"{rows} rows of {args.context}, {bits} bits: {ratios[0]:.2f} {median(ratios):.2f} {ratios[-1]:.2f}"
                f"   ({median(speeds[0]):,.0f} -> {median(speeds[bits]):,.0f} tok/s)   {AIMS[bits]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
