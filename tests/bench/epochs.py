"""A job's prompts for the second time, with the memory of the first over without: `python -m tests.bench.epochs`.

The tiny model writes its sums at temperature 1, as rollouts do: each prompt is sampled by a group, all of them once an
epoch, under other seeds each time. Engines decode the same sequences in one process, with as many rows in flight as
a worker would claim; the next turn is that of the engine with fewer tokens. On a CPU, seconds are those of its work,
since other programs are none of ours. The first epoch shows what looking for drafts costs.

Of four engines one drafts where its clock says that it pays (the default), one always (`--no-adaptive-k`); one has no
memory, and one keeps no tails of short prompts either (worker/engine/prefixes/tails.py). A drafting engine's clock
stands still while another engine computes, as in a worker, which has one.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import cast

import mlx.core as mx

from mlx_model.config import EngineConfig, SpeculationConfig
from mlx_model.loader import LoadedModel, load_model
from shared.seeds import derived_seed
from shared.sequences import SamplingParams, SequenceSpec
from shared.text.codec import TextCodec
from tests.bench.own_time import OwnTime
from trainer.tiny.data import arithmetic_prompts
from worker.engine.engine import Engine
from worker.engine.messages import EngineStats, RowRequest
from worker.engine.prefixes.tails import Tails
from worker.engine.warm_up import rehearse

Clock = Callable[[], float]

AIM = 1.5
CLOCK = time.process_time if mx.default_device() == mx.Device(mx.cpu) else time.perf_counter


class Epoch:
    """Sequences of one engine, so many of them in flight."""

    def __init__(self, engine: Engine, specs: Sequence[SequenceSpec], rows: int) -> None:
        self._engine = engine
        self._clock = cast(OwnTime, engine.drafting._clock)
        self._left = deque(specs)
        self._rows = rows
        self.written: dict[str, list[int]] = {spec.id: [] for spec in specs}
        self.tokens, self.seconds = 0, 0.0
        self._running = 0
        self._began: dict[str, float] = {}  # of those without a token
        self._waits: list[float] = []

    @property
    def is_over(self) -> bool:
        """Whether all have ended."""
        return not (self._left or self._running)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def first_token_s(self) -> float:
        """From a submission to the first token, the median."""
        return median(self._waits)

    def turn(self) -> None:
        """One turn, timed, with what a worker does before it."""
        began = CLOCK()
        self._clock.go_on()
        fresh = [self._left.popleft() for _ in range(min(self._rows - self._running, len(self._left)))]
        self._running += len(fresh)
        self._began.update((spec.id, self.seconds) for spec in fresh)
        if fresh:
            self._engine.submit([RowRequest(spec) for spec in fresh])
        events = self._engine.turn().events
        self._engine.settle()
        self._clock.stop()
        self.seconds += CLOCK() - began
        for event in events:
            self.written[event.seq] += event.tokens
            self.tokens += len(event.tokens)
            if event.tokens and event.seq in self._began:
                self._waits.append(self.seconds - self._began.pop(event.seq))
            self._running -= event.finish is not None


class Job:
    """Prompts, and groups of samples of each."""

    def __init__(self, loaded: LoadedModel, prompts: int, samples: int, tokens: int) -> None:
        codec = TextCodec(loaded.tokenizer)
        self._prompts = [
            tuple(codec.encode_chat([{"role": "user", "content": task.question}]))
            for task in arithmetic_prompts(prompts, 0)
        ]
        self._samples, self._tokens = samples, tokens

    def epoch(self, number: int) -> list[SequenceSpec]:
        """All sequences of an epoch."""
        return [
            SequenceSpec(f"{number}-{at}-{sample}", "m", prompt, self._sampling(number, at, sample), "batch")
            for at, prompt in enumerate(self._prompts)
            for sample in range(self._samples)
        ]

    def _sampling(self, *of: int) -> SamplingParams:
        return SamplingParams(self._tokens, derived_seed(*of))


def measured(
    loaded: LoadedModel, job: Job, config: EngineConfig, drafts: SpeculationConfig, rounds: int, clock: Clock
) -> None:
    """Print the ratios of the epochs after the first one."""
    if mx.default_device() != mx.Device(mx.cpu):
        list(rehearse(loaded, replace(config, speculation=drafts)))
    deciding, always = (replace(config, speculation=replace(drafts, adapts_to_time=adapts)) for adapts in (True, False))
    engines = [Engine(loaded, each) for each in (config, config, deciding, always)]
    for engine in engines:
        engine.drafting._clock = OwnTime(clock)
    engines[0].prefixes._tails = Tails(0)
    ratios: list[tuple[float, ...]] = []
    for number in range(rounds + 1):
        before = [engine.stats() for engine in engines]
        epochs = [Epoch(engine, job.epoch(number), config.max_rows) for engine in engines]
        while running := [epoch for epoch in epochs if not epoch.is_over]:
            min(running, key=lambda epoch: epoch.tokens).turn()
        changed = sum(len({tuple(epoch.written[seq]) for epoch in epochs}) > 1 for seq in epochs[0].written)
        without, tails, decided, drafted = (epoch.rate for epoch in epochs)
        first = epochs[1].first_token_s / epochs[0].first_token_s
        ratios.append((decided / tails, drafted / tails, tails / without, decided / without, drafted / without, first))
        steps = " and ".join(_steps(*each) for each in list(zip(engines, before, strict=True))[2:])
        print(
            f"  epoch {number + 1}: {without:6.0f} -> {tails:6.0f} -> {decided:6.0f} / {drafted:6.0f} tok/s, "
            f"x {decided / tails:.2f} / {drafted / tails:.2f}; {steps}; {changed} changed",
            flush=True,
        )
    each_decided, each_always = (" ".join(f"{ratio[at]:.2f}" for ratio in ratios[1:]) for at in (0, 1))
    middle, middle_always, tails_alone, together, together_always, first = (
        median(each) for each in zip(*ratios[1:], strict=True)
    )
    print(
        f"{config.max_rows:3} rows, blocks of {config.block_size}: the clock deciding x {middle:.2f} ({each_decided}), "
        f"always x {middle_always:.2f} ({each_always}), aim {AIM}; tails alone x {tails_alone:.2f}, their first tokens "
        f"x {first:.2f}; memory and tails x {together:.2f} / {together_always:.2f}",
        flush=True,
    )


def _steps(engine: Engine, before: EngineStats) -> str:
    now, was, steps = engine.stats().speculation, before.speculation, engine.stats().steps - before.steps
    checked, drafted = now.steps - was.steps, now.drafted - was.drafted
    return f"{checked} of {steps} steps check, {now.accepted - was.accepted} of {drafted} accepted"


def main() -> None:
    """A line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--draft", type=int, default=7, help="tokens of a draft, at most")
    parser.add_argument("--block-size", type=int, nargs="+", default=[64, 8], help="64: more than a prompt has")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wall", action="store_true", help="what the engine's clock tells, though tokens/s do not")
    args = parser.parse_args()
    loaded = load_model(EngineConfig(args.model))
    clock = time.perf_counter if args.wall else CLOCK
    job = Job(loaded, args.prompts, args.samples, args.tokens)
    for rows in args.rows:
        drafts = SpeculationConfig(args.draft, memory_bytes=64 << 20)
        for block_size in args.block_size:
            config = EngineConfig("", max_rows=rows, block_size=block_size)
            measured(loaded, job, config, drafts, args.rounds, clock)


if __name__ == "__main__":
    main()
