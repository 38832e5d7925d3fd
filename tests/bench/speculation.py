"""Drafts on over off: `python -m tests.bench.speculation [--shape small|medium|0.6b|4b] [--rows 1 8 32]`.

Weights are random, so what would be accepted of a real model's text says nothing. So completions are recorded first,
without drafts, and given as predictions of which each token is right with a set chance: 1 is a copying task, 0 a text
that nobody could foresee. Tokens per second are ratios of runs in turn, in one process; tokens must be equal.
"""

# ruff: noqa: E402
from worker.engine.model import fast_blas

fast_blas.install()

import argparse
import random
import time
from collections.abc import Sequence
from statistics import median

import mlx.core as mx

from shared.sequences import SamplingParams, SequenceSpec
from tests.bench.adapters import SHAPES, random_model
from worker.engine.engine import Engine
from worker.engine.messages import EngineConfig, RowRequest, SpeculationConfig
from worker.engine.model.loader import LoadedModel

AIMS = {(1, 1.0): "aim 2.0", (8, 1.0): "aim 1.4", (32, 0.0): "aim 0.97", (32, 0.7): "aim 0.97", (32, 1.0): "aim 0.97"}


class Runs:
    """One engine with drafts and one without, over the same prompts."""

    def __init__(
        self, loaded: LoadedModel, rows: int, tokens: int, context: int, speculation: SpeculationConfig
    ) -> None:
        plain = EngineConfig("", max_rows=rows, prefill_chunk=256, prefix_cache_bytes=0)
        self._plain = Engine(loaded, plain)
        self._drafting = Engine(
            loaded, EngineConfig("", max_rows=rows, prefill_chunk=256, prefix_cache_bytes=0, speculation=speculation)
        )
        self._rows, self._tokens, self._context, self._vocab = rows, tokens, context, loaded.card.vocab_size
        self.drafted = self.accepted = self.changed = 0

    def ratio(self, chance: float, seed: int) -> float:
        """Tokens per second with drafts of such a chance over those without."""
        draw = random.Random(seed)
        prompts = [tuple(draw.randrange(3, self._vocab) for _ in range(self._context)) for _ in range(self._rows)]
        plain_s, written = self._decode(self._plain, prompts, [()] * self._rows, seed)
        guesses = [
            tuple(id_ if draw.random() < chance else draw.randrange(3, self._vocab) for id_ in each) for each in written
        ]
        before = self._drafting.stats().speculation
        drafting_s, again = self._decode(self._drafting, prompts, guesses, seed)
        after = self._drafting.stats().speculation
        self.changed += sum(first != second for first, second in zip(written, again, strict=True))
        self.drafted += after.drafted - before.drafted
        self.accepted += after.accepted - before.accepted
        return plain_s / drafting_s

    def _decode(
        self, engine: Engine, prompts: Sequence[tuple[int, ...]], guesses: Sequence[tuple[int, ...]], seed: int
    ) -> tuple[float, list[list[int]]]:
        """Seconds from the last first token to the end, and what was written."""
        engine.submit(
            RowRequest(
                SequenceSpec(
                    str(at),
                    "m",
                    prompt,
                    SamplingParams(self._tokens, seed + at, temperature=1.0, ignore_eos=True),
                    prediction_ids=guess,
                )
            )
            for at, (prompt, guess) in enumerate(zip(prompts, guesses, strict=True))
        )
        written: list[list[int]] = [[] for _ in prompts]
        began = 0.0
        while engine.busy:
            for event in engine.turn().events:
                written[int(event.seq)] += event.tokens
            engine.settle()
            if not began and all(written):
                began = time.perf_counter()
        return time.perf_counter() - began, written


def main() -> None:
    """A table of ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="medium")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--chances", type=float, nargs="+", default=[1.0, 0.7, 0.0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--draft", type=int, default=5, help="tokens of a draft, at most")
    parser.add_argument("--rounds", type=int, default=3)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    parser.add_argument("--dtype", default="float32" if on_cpu else "bfloat16")
    args = parser.parse_args()
    loaded = random_model(SHAPES[args.shape], args.dtype)
    for rows in args.rows:
        for chance in args.chances:
            runs = Runs(loaded, rows, args.tokens, args.context, SpeculationConfig(args.draft))
            ratios = [runs.ratio(chance, seed) for seed in range(args.rounds + 1)][1:]
            shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
            print(
                f"{rows:3} rows, predictions right in {chance:.0%}: x {median(ratios):.2f} ({shown}), accepted "
                f"{runs.accepted} of {runs.drafted}, {runs.changed} rows changed {AIMS.get((rows, chance), '')}",
                flush=True,
            )


if __name__ == "__main__":
    main()
