"""Two runs whose data stays apart against one that has all of it: `python -m tests.bench.federation`.

Additions of the tiny model in two families: written as formulas, and asked in words. Pooled, one run learns from both;
federated, each of two runs has one family and half of the samples a step, and they average weights every `--sync-every`
steps; alone, a run has one family and nobody. All are measured on held-out additions of both. The trainers' own loop
and learners, a real Redis between them, samples from the same process (tests/training/in_process.py).
"""

# ruff: noqa: E402
from worker.engine.model import fast_blas

fast_blas.install()

import argparse
import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import Any

from api.serve.embedded_redis import EmbeddedRedis
from shared.process import logs
from shared.process.settings import load
from shared.seeds import derived_seed
from tests.training.in_process import MemorySink
from tests.training.run import train
from trainer.rollouts.environments import Observation, Outcome
from trainer.rounds.federation import federation
from trainer.settings import TrainSettings
from trainer.tiny.data import Split, arithmetic_prompts

FAMILIES = ("formulas", "words")


def family(question: str) -> str:
    """Which one a question is of."""
    return "formulas" if question.endswith(("=", "= ?")) else "words"


class Additions:
    """Those of some families, in turn."""

    name = "additions"

    def __init__(self, families: tuple[str, ...], seed: int, split: Split) -> None:
        self._families, self._seed, self._split = families, seed, split

    async def reset(self, index: int) -> Observation:
        """The first addition of the family among those that the index draws."""
        wanted = self._families[index % len(self._families)]
        drawn = arithmetic_prompts(32, derived_seed(self._seed, self._split, index), self._split)
        task = next((each for each in drawn if family(each.question) == wanted), drawn[0])
        return Observation(({"role": "user", "content": task.question},), info=task.answer)

    async def step(self, observation: Observation, action: str) -> Outcome:
        """1 when the whole reply is the number."""
        return Outcome(float(action == observation.info))


def settings(options: argparse.Namespace, folder: Path, name: str, prompts: int, *more: str) -> TrainSettings:
    steps = "1" if name == "start" else str(options.steps)
    return load(
        TrainSettings,
        [
            *("--adapter", "policy", "--run", name, "--run-dir", str(folder), "--steps", steps),
            *("--prompts-per-step", str(prompts), "--group-size", str(options.group_size), "--max-tokens", "5"),
            *("--learning-rate", "1e-9" if name == "start" else "1e-3", "--warmup-steps", "3", "--lora-rank", "64"),
            *("--evaluate-every", steps, "--evaluate-prompts", str(options.evaluated)),
            *("--max-update-rms", "1", "--distances-every", "0", "--parity-every", "0", "--checkpoint-every", "0"),
            *("--seed", str(options.seed), *more),
        ],
    )


async def learned(options: argparse.Namespace, made: TrainSettings, families: tuple[str, ...], **ring: Any) -> float:
    """Held-out exact of both families at the run's end."""
    tasks = {"environment": Additions(families, options.seed, "train"), "held_out": Additions(FAMILIES, 7, "held_out")}
    state, _ = await train(made, MemorySink(), **tasks, **ring)
    assert state.held_out is not None
    return state.held_out


async def measure(options: argparse.Namespace, folder: Path, url: str) -> None:
    if options.known is None:
        start = await learned(options, settings(options, folder, "start", 2), FAMILIES)
        print(f"start {start:.3f}", flush=True)
        pooled = await learned(options, settings(options, folder, "pooled", options.prompts), FAMILIES)
        print(f"pooled {pooled:.3f}", flush=True)
    else:
        start, pooled = options.known

    async def member(name: str) -> float:
        rounds = ["--federation", "bench", "--sync-every", str(options.sync_every)]
        rounds += ["--outer-rate", str(options.outer_rate), "--outer-momentum", str(options.outer_momentum)]
        made = settings(options, folder, name, options.prompts // 2, *rounds)
        async with contextlib.AsyncExitStack() as stack:
            place = await stack.enter_async_context(federation(made, url, "base", "ring"))
            return await learned(options, made, (name,), federation=place)

    both = await asyncio.gather(*(member(name) for name in FAMILIES))
    print(f"federated {both[0]:.3f} {both[1]:.3f}", flush=True)
    gain = (sum(both) / 2 - start) / (pooled - start)
    print(f"federated gain over pooled gain: {gain:.2f}", flush=True)
    for name in FAMILIES if options.alone else ():
        alone = await learned(options, settings(options, folder, f"{name}-alone", options.prompts // 2), (name,))
        print(f"{name} alone {alone:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="a multiple of --sync-every")
    parser.add_argument("--sync-every", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64, help="in a step of the pooled run; of each member half")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--evaluated", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outer-rate", type=float, default=1.0)
    parser.add_argument("--outer-momentum", type=float, default=0.0)
    parser.add_argument(
        "--known", nargs=2, type=float, metavar=("START", "POOLED"), help="as measured before, with the same options"
    )
    parser.add_argument("--alone", action="store_true", help="also each family alone")
    options = parser.parse_args()
    logs.configure("WARNING")
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder)) as redis:
        asyncio.run(measure(options, Path(folder), redis.url))


if __name__ == "__main__":
    main()
