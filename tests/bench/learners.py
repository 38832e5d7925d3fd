"""Many learners over one base: `python -m tests.bench.learners [--shape small|qwen3-0.6b|...]`.

What 16 learners at once do over one with as many tokens, what they take of memory, and what they could gain at most if
microbatches of theirs were computed together. The service's learners and turns, in one process on a model with random
weights, without Redis. Stretches of each kind alternate, so the ratios hold whatever else the machine does.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import mlx.core as mx
import numpy as np

from mlx_model.config import EngineConfig
from mlx_model.loader import load_model
from shared.learners import Datum, LearnerSpec, PassRequest, StepRequest, Values
from tests.bench.models import SHAPES, random_qwen3
from trainer.learn.compute import ThreadHost, at_once
from trainer.service.learner import ServiceLearner
from trainer.service.turns import Turns

MB = 1e6


@dataclass(frozen=True)
class Options:
    """What is measured."""

    shape: str
    dtype: str
    learners: int
    rows: int  # of a pass
    length: int  # tokens of a row
    rank: int
    passes: int  # of a learner in a stretch, each with a step
    rounds: int


def examples(shape: str, rows: int, length: int, seed: int) -> PassRequest:
    """A pass over random tokens."""
    draw = np.random.default_rng(seed)
    vocabulary = SHAPES[shape]["vocab_size"]

    def datum() -> Datum:
        ids, targets = draw.integers(0, vocabulary, (2, length))
        weights = Values.of(np.ones(length, np.float32))
        return Datum(ids.astype("<i4").tobytes(), {"target_tokens": Values.of(targets), "weights": weights})

    return PassRequest(tuple(datum() for _ in range(rows)), "cross_entropy")


@dataclass(frozen=True)
class Took:
    """Of a stretch."""

    seconds: float
    cpu_seconds: float  # of the process: what others do on the machine moves them less


async def stretch(
    host: ThreadHost, learners: Sequence[ServiceLearner], passes: Sequence[PassRequest], count: int
) -> Took:
    """Until each learner has done its pass, with a step, so many times."""
    turns = Turns(host)

    async def learn(name: str, learner: ServiceLearner, request: PassRequest) -> None:
        for _ in range(count):
            await turns.run(name, lambda: learner.run(request))
            await turns.run(name, at_once(lambda: learner.step(StepRequest())))

    began, cpu = time.perf_counter(), time.process_time()
    each = zip(learners, passes, strict=True)
    await asyncio.gather(*(learn(str(place), learner, request) for place, (learner, request) in enumerate(each)))
    return Took(time.perf_counter() - began, time.process_time() - cpu)


async def measure(options: Options, folder: Path) -> None:
    """All of it, in the thread of a service."""
    async with ThreadHost() as host:
        config = EngineConfig(str(folder), dtype=options.dtype)
        loaded = await host.run(at_once(lambda: load_model(config)))
        count = options.learners

        def build(seed: int) -> ServiceLearner:
            spec = LearnerSpec(id=str(seed), model="m", rank=options.rank, scale=2.0, seed=seed)
            return ServiceLearner(loaded.model, spec)

        async def active() -> int:
            return await host.run(at_once(_active))

        base = await active()
        learners = [await host.run(at_once(partial(build, seed))) for seed in range(count)]
        weights = await host.run(at_once(learners[0].weights))
        own = 3 * sum(value.nbytes for value in weights.values())  # and its two moments
        passes = [examples(options.shape, options.rows, options.length, seed) for seed in range(count)]
        joined = PassRequest(tuple(datum for request in passes for datum in request.data), "cross_entropy")

        async def side_by_side() -> Took:
            return await stretch(host, learners, passes, options.passes)

        async def one() -> Took:
            return await stretch(host, learners[:1], passes[:1], options.passes * count)

        async def together() -> Took:
            return await stretch(host, learners[:1], [joined], options.passes)

        kinds = (one, side_by_side, together)
        for kind in kinds:  # kernels are compiled
            await kind()
        mx.reset_peak_memory()
        await one()
        peak_of_one = mx.get_peak_memory()
        mx.reset_peak_memory()
        await side_by_side()
        peak = mx.get_peak_memory()
        took: list[list[Took]] = [[await kind() for kind in kinds] for _ in range(options.rounds)]
        after = await active()

    tokens = count * options.passes * options.rows * options.length
    print(f"{options.shape}, {options.dtype}, rank {options.rank}, passes of {options.rows} rows x {options.length}")
    wall, cpu = ([[getattr(each, name) for each in turn] for turn in took] for name in ("seconds", "cpu_seconds"))
    for what, seconds in (("", wall), ("CPU ", cpu)):
        alone, beside = (tokens / median(each[kind] for each in seconds) for kind in (0, 1))
        print(f"  tokens per {what}second: one learner {alone:.0f}, {count} at once {beside:.0f}")
        print(f"    {count} at once over one with equal tokens:           {spread([s[0] / s[1] for s in seconds])}")
        print(
            f"    one with all rows in one pass over {count} at once:   {spread([s[1] / s[2] for s in seconds])}",
            flush=True,
        )
    print(
        f"  memory: base {base / MB:.1f} MB, a learner's weights and moments {own / MB:.2f} MB, with {count}", end=" "
    )
    print(f"learners {after / MB:.1f} MB: {after / (base + count * own):.3f} of base + learners")
    print(
        f"  peak over what is held: one at work {(peak_of_one - after) / MB:.1f} MB, {count} {(peak - after) / MB:.1f}"
    )


def spread(ratios: Sequence[float]) -> str:
    """Median, least and most."""
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _active() -> int:
    mx.clear_cache()
    return mx.get_active_memory()


def main(argv: list[str] | None = None) -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.learners", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    for name, default in (("learners", 16), ("rows", 4), ("length", 128), ("rank", 16), ("passes", 2), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = Options(**vars(parser.parse_args(argv)))
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, random_qwen3(Path(folder) / "model", SHAPES[options.shape], options.dtype)))


if __name__ == "__main__":
    main()
