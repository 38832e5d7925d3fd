"""Two runs whose data stays apart against one that has all of it: `python -m tests.bench.federation`.

Additions of the tiny model in two families: written as formulas, and asked in words. Pooled, one run learns from both;
federated, each of two runs has one family and half of the samples a step, and they average weights every `--sync-every`
steps; alone, a run has one family and nobody. All are measured on held-out additions of both. The trainers' own loop
and learners, a real Redis between them, samples from the same process (tests/training/in_process.py).
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import asyncio
import contextlib
import math
import tempfile
from pathlib import Path
from typing import Any

from api.serve.embedded_redis import EmbeddedRedis
from shared.process import logs
from shared.process.settings import load
from shared.seeds import derived_seed
from shared.training import TrainingPoint
from tests.training.in_process import MemorySink
from tests.training.nobody import NoBoard
from tests.training.run import train
from trainer.learners.federation import federation
from trainer.ring.board import RingBoard
from trainer.rollouts.environments import Observation, Outcome
from trainer.runs.loop import TrainLoop
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
    """Of one run."""
    return load(
        TrainSettings,
        [
            *("--adapter", "policy", "--run", name, "--run-dir", str(folder), "--steps", str(options.steps)),
            *("--prompts-per-step", str(prompts), "--group-size", str(options.group_size), "--max-tokens", "5"),
            *("--learning-rate", "1e-3", "--warmup-steps", "3", "--lora-rank", "64"),
            *("--evaluate-every", str(options.evaluate_every), "--evaluate-prompts", str(options.evaluated)),
            *("--distances-every", "0", "--parity-every", "0", "--checkpoint-every", "0"),
            *("--max-update-rms", "1", "--reward-margin", "1"),
            *("--seed", str(options.seed), *options.settings.split(), *more),
        ],
    )


class Curve(NoBoard):
    """Held-out exact answers of a run, whenever they are measured."""

    def __init__(self, name: str) -> None:
        self._name, self.exact = name, list[float]()

    async def add(self, point: TrainingPoint) -> None:
        if point.held_out is not None:
            self.exact.append(point.held_out)
            print(f"{self._name}, step {point.train_step + 1}: {point.held_out:.4f}", flush=True)


async def learned(made: TrainSettings, families: tuple[str, ...], start: float, **ring: Any) -> list[float]:
    """The curve, of both families; `start`: before the first step."""
    curve = Curve(made.run_name)
    tasks = {"environment": Additions(families, made.seed, "train"), "held_out": Additions(FAMILIES, 7, "held_out")}

    def begun(loop: TrainLoop) -> None:
        loop.state.held_out = start

    state, _ = await train(made, MemorySink(), on_loop=begun, board=RingBoard(curve), **tasks, **ring)
    if state.rejected:
        print(f"{made.run_name}: its gate refused {state.rejected} versions", flush=True)
    return curve.exact


async def at_start(options: argparse.Namespace, folder: Path) -> float:
    """Held-out exact of the base."""
    made = settings(options, folder, "start", 2, "--steps", "1", "--learning-rate", "1e-9", "--evaluate-every", "1")
    tasks = {"environment": Additions(FAMILIES, 0, "train"), "held_out": Additions(FAMILIES, 7, "held_out")}
    state, _ = await train(made, MemorySink(), **tasks)
    assert state.held_out is not None
    print(f"start {state.held_out:.4f}", flush=True)
    return state.held_out


async def federated(options: argparse.Namespace, folder: Path, url: str, start: float) -> list[float]:
    """The curve of the two runs; the second one's weights are the first one's whenever a round is over."""

    async def member(name: str) -> list[float]:
        rounds = ["--federation", "bench", "--sync-every", str(options.sync_every), *options.rounds.split()]
        if name != FAMILIES[0]:
            rounds += ["--evaluate-every", "0"]
        made = settings(options, folder, name, options.prompts // 2, *rounds)
        async with contextlib.AsyncExitStack() as stack:
            place = await stack.enter_async_context(federation(made, url, "base", "ring"))
            return await learned(made, (name,), start, federation=place)

    curve, _ = await asyncio.gather(*(member(name) for name in FAMILIES))
    return curve


async def measure(options: argparse.Namespace, folder: Path, url: str) -> None:
    """One line for each curve, and how the gains compare."""
    start = await at_start(options, folder) if options.start is None else options.start
    curves: dict[str, list[float]] = {}
    if "pooled" in options.runs:
        more = ["--learning-rate", str(options.pooled_rate)]
        curves["pooled"] = await learned(settings(options, folder, "pooled", options.prompts, *more), FAMILIES, start)
    if "federated" in options.runs:
        curves["federated"] = await federated(options, folder, url, start)
    if len(curves) == 2:
        pairs = zip(curves["federated"], curves["pooled"], strict=True)
        ratios = [(mine - start) / (pooled - start or math.nan) for mine, pooled in pairs]
        print(f"federated gain over pooled gain: {' '.join(f'{ratio:.2f}' for ratio in ratios)}", flush=True)
    for name in FAMILIES if "alone" in options.runs else ():
        await learned(settings(options, folder, f"{name}-alone", options.prompts // 2), (name,), start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="a multiple of --evaluate-every")
    parser.add_argument("--evaluate-every", type=int, default=40, help="a multiple of --sync-every")
    parser.add_argument("--evaluated", type=int, default=2000, help="held-out questions")
    parser.add_argument("--sync-every", type=int, default=5)
    parser.add_argument("--rounds", default="", help="further settings of the two, such as '--outer-rate 1.5'")
    parser.add_argument("--settings", default="", help="further settings of all runs, such as '--max-lag 0'")
    parser.add_argument("--prompts", type=int, default=64, help="in a step of the pooled run; of each member half")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--pooled-rate", type=float, default=1e-3, help="the pooled run's learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=float, help="as measured before with the same --evaluated")
    parser.add_argument(
        "--runs", nargs="+", default=["pooled", "federated"], choices=("pooled", "federated", "alone"), help="which"
    )
    options = parser.parse_args()
    logs.configure("WARNING")
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder)) as redis:
        asyncio.run(measure(options, Path(folder), redis.url))


if __name__ == "__main__":
    main()
