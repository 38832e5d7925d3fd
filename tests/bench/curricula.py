"""Train steps to the same held-out reward, with a curriculum and without: `python -m tests.bench.curricula`.

A data set of four levels, as many tasks of each: thanks and farewells, to which the tiny model has the answer; sums of
two numbers of two digits, a quarter of which it gets right; sums with a number of one digit, of which it gets one in
sixteen right; sums of three digits, which it never does. Held-out tasks ask for the same in other words, which no
training task has. Each seed draws another data set and another adapter. Steps are counted, not seconds, so other
programs do no harm.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import asyncio
import json
import logging
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from shared.jobs import Message
from tests.training.run import train
from trainer.rollouts.difficulty import DifficultyField
from trainer.rollouts.environments import DatasetEnvironment, Scored, read_jsonl
from trainer.runs.metrics import read
from trainer.settings import TrainSettings
from trainer.tiny.data import FAREWELL, THANKS, Split

AIM = 1.3
Curve = list[float]
LEVELS = ("talk", "two-digits", "one-digit", "three-digits")
WINDOW = 3  # evaluations that are averaged: one alone has a standard error of 0.02
FRACTIONS = (0.5, 0.75, 1.0)  # of what uniform draws gain
_TALK = {
    **dict.fromkeys(("thanks", "Thank you!", "thank you", "Thanks!"), THANKS),
    **dict.fromkeys(("bye", "Goodbye!", "see you", "Bye!"), FAREWELL),
}
_SUMS = {
    "train": ("{}+{}=", "What is {} + {}?", "Add {} and {}."),
    "held_out": ("{} + {} = ?", "what is {} plus {}?"),
}
_RANGES = {"two-digits": ((10, 99), (10, 99)), "one-digit": ((0, 99), (0, 9)), "three-digits": ((100, 999),) * 2}


def write(path: Path, tasks: int, split: Split, seed: int) -> Path:
    """A data set, as a user has one; both splits of a seed are about the same numbers."""
    rng = random.Random(seed)
    with path.open("w") as lines:
        for number in range(tasks):
            level = LEVELS[number % len(LEVELS)]
            if level == "talk":
                question, answer = rng.choice(list(_TALK.items()))
            else:
                a, b = (rng.randint(*bounds) for bounds in _RANGES[level])
                wordings = _SUMS[split]
                question, answer = wordings[number // len(LEVELS) % len(wordings)].format(a, b), str(a + b)
            messages: list[Message] = [{"role": "user", "content": question}]
            lines.write(json.dumps({"prompt": messages, "reference": answer, "difficulty": level}) + "\n")
    return path


async def exact(completion: str, reference: Any, prompt: object) -> Scored:
    """1 for the reference, else 0."""
    return float(completion == reference), {}


def held_out_curve(args: argparse.Namespace, curriculum: str, seed: int, folder: Path) -> Curve:
    """A run's rewards on held-out tasks, every so many train steps; the last one again where nothing was learned."""
    training = write(folder / "train.jsonl", args.tasks, "train", seed)
    held_out = write(folder / "held-out.jsonl", args.tasks, "held_out", seed)
    settings = TrainSettings(
        seed=seed, run_dir=folder, curriculum=curriculum.partition("+")[0],  # type: ignore[arg-type]
        curriculum_field="difficulty" if "+field" in curriculum else "",
        steps=args.steps, prompts_per_step=args.prompts, group_size=args.group, max_tokens=8, max_lag=args.max_lag,
        learning_rate=args.rate, warmup_steps=5, lora_rank=args.rank, evaluate_every=args.every,
        evaluate_prompts=args.tasks, checkpoint_every=0, parity_every=0, distances_every=0, probe_prompts=2,
        **json.loads(args.options),
    )  # fmt: skip
    field = DifficultyField("difficulty", LEVELS)
    environments = {
        "environment": DatasetEnvironment("mixed", read_jsonl(training, difficulty=field), exact, seed),
        "held_out": DatasetEnvironment("held-out", read_jsonl(held_out), exact),
    }
    asyncio.run(train(settings, **environments))
    lines = read(folder / "policy" / "metrics.jsonl")
    used = sum(line.taught for line in lines) / sum(line.groups for line in lines)
    known = next(line.held_out for line in lines if line.held_out is not None)
    curve: Curve = []
    for line in lines[args.every - 1 :: args.every]:
        known = known if line.held_out is None else line.held_out
        curve.append(known)
    shown = " ".join(f"{reward:.2f}" for reward in curve)
    print(f"  {curriculum:12} seed {seed}: {used:.0%} of groups taught; held-out {shown}", flush=True)
    return curve


def smooth(curve: Sequence[float]) -> list[float]:
    """Each evaluation with those before it."""
    return [float(np.mean(curve[max(0, i - WINDOW + 1) : i + 1])) for i in range(len(curve))]


def steps_to(curve: Sequence[float], goal: float, every: int) -> float:
    """Train steps, between two evaluations by their line; infinite where the curve ends below."""
    before = 0.0
    for number, reward in enumerate(smooth(curve)):
        if reward >= goal:
            return every * (number + ((goal - before) / (reward - before) if number else 1.0))
        before = reward
    return float("inf")


def compare(curves: dict[str, list[list[float]]], every: int) -> None:
    """A line for each goal: how many times fewer train steps, seed by seed."""
    uniform = curves.pop("uniform")
    first = float(np.mean([curve[0] for curve in uniform]))
    last = min(smooth(curve)[-1] for curve in uniform)
    for name, others in curves.items():
        for fraction in FRACTIONS:
            goal = first + fraction * (last - first)
            pairs = [(steps_to(u, goal, every), steps_to(c, goal, every)) for u, c in zip(uniform, others, strict=True)]
            each = ", ".join(f"{u:.0f} -> {c:.0f}" for u, c in pairs)
            ratio = sum(u for u, _ in pairs) / sum(c for _, c in pairs)
            print(f"{name:12} to {goal:.2f}: x {ratio:.2f} fewer train steps ({each}), aim {AIM}", flush=True)


def main() -> None:
    """A curve for each run, then how many times fewer steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--curricula", nargs="+", default=["reward", "reward+field", "difficulty"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--max-lag", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--options", default='{"schedule": "linear"}', help="further settings of all runs, as JSON")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    curves: dict[str, list[list[float]]] = {}
    for name in ("uniform", *args.curricula):
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                curves.setdefault(name, []).append(held_out_curve(args, name, seed, Path(folder)))
    compare(curves, args.every)


if __name__ == "__main__":
    main()
