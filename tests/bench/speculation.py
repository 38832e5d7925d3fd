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
from dataclasses import replace
from statistics import median

import mlx.core as mx

from shared.sequences import SamplingParams, SequenceSpec
from tests.bench.adapters import SHAPES, random_model
from worker.engine.engine import Engine
from worker.engine.messages import EngineConfig, RowRequest, SpeculationConfig
from worker.engine.model.loader import LoadedModel

AIMS = {(1, 1.0): "aim 2.0", (8, 1.0): "aim 1.4", (32, 0.0): "aim 0.97", (32, 0.7): "aim 0.97", (32, 1.0): "aim 0.97"}


class Decoding:
    """Rows of one engine, past their prompts."""

    def __init__(self, engine: Engine, requests: Sequence[RowRequest]) -> None:
        self._engine = engine
        self.written: list[list[int]] = [[] for _ in requests]
        self.tokens, self.seconds = 0, 0.0
        engine.submit(requests)
        while not all(self.written):
            self.turn()
        self.tokens, self.seconds = 0, 0.0

    @property
    def is_busy(self) -> bool:
        """Whether rows are left."""
        return self._engine.busy

    def turn(self) -> None:
        """One turn, timed."""
        began = time.perf_counter()
        events = self._engine.turn().events
        self._engine.settle()
        took = time.perf_counter() - began
        for event in events:
            self.written[int(event.seq)] += event.tokens
        self.tokens += sum(len(event.tokens) for event in events)
        self.seconds += took


class Runs:
    """One engine with drafts and one without, over the same prompts."""

    def __init__(self, loaded: LoadedModel, rows: int, tokens: int, context: int, drafts: SpeculationConfig) -> None:
        config = EngineConfig("", max_rows=rows, prefill_chunk=256, prefix_cache_bytes=0)
        self._plain, self._drafting = Engine(loaded, config), Engine(loaded, replace(config, speculation=drafts))
        self._rows, self._tokens, self._context, self._vocab = rows, tokens, context, loaded.card.vocab_size
        self.drafted = self.accepted = self.changed = 0

    def ratio(self, chance: float, seed: int) -> float:
        """Tokens per second with drafts of such a chance over those without; turns of both alternate."""
        draw = random.Random(seed)
        prompts = [tuple(draw.randrange(3, self._vocab) for _ in range(self._context)) for _ in range(self._rows)]
        recorded = Decoding(self._plain, self._requests(prompts, [()] * self._rows, seed))
        while recorded.is_busy:
            recorded.turn()
        guesses = [
            tuple(id_ if draw.random() < chance else draw.randrange(3, self._vocab) for id_ in each)
            for each in recorded.written
        ]
        before = self._drafting.stats().speculation
        plain = Decoding(self._plain, self._requests(prompts, [()] * self._rows, seed))
        drafting = Decoding(self._drafting, self._requests(prompts, guesses, seed))
        while plain.is_busy or drafting.is_busy:
            for each in (plain, drafting):
                if each.is_busy:
                    each.turn()
        after = self._drafting.stats().speculation
        self.changed += sum(first != second for first, second in zip(plain.written, drafting.written, strict=True))
        self.drafted += after.drafted - before.drafted
        self.accepted += after.accepted - before.accepted
        return drafting.tokens / drafting.seconds / (plain.tokens / plain.seconds)

    def _requests(
        self, prompts: Sequence[tuple[int, ...]], guesses: Sequence[tuple[int, ...]], seed: int
    ) -> list[RowRequest]:
        return [
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
        ]


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
