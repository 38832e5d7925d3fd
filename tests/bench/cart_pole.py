"""PPO learns to hold a pole on a cart, over a ring: `python -m tests.bench.cart_pole [--seeds 0 1 2]`.

For each seed a ring with models/tiny and one worker is started, and `mlx_parallm_train` with the recipe: the worker
acts, through /v1/rl/act, and the trainer publishes a version after each train step. At the end the version that was
best in the run's own evaluations plays 100 episodes from other starts, deterministic. Other flags are the trainer's:
`--task cart-pole-masked --memory gru` learns without speeds, and without `--memory` does not.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from shared.process.settings import load
from tests.e2e.rings import Process, Ring, ring
from trainer.ring.http_client import HttpApi
from trainer.rollouts.cart_pole import CartPole
from trainer.runs.acting import Actor, evaluate
from trainer.runs.ppo import PpoLine, network_of
from trainer.settings import TrainSettings

AIM = 450.0
RECIPE = "trainer/recipes/cart-pole.yaml"
_OTHER_STARTS = 10_000


def lines_of(trainer: Process, file: Path) -> Iterator[PpoLine]:
    """The run's lines as they are written, to its end."""
    read = 0
    while True:
        is_over = trainer.popen.poll() is not None
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        for line in lines[read:]:
            if line.endswith(b"\n"):
                read += 1
                yield msgspec.json.decode(line, type=PpoLine)
        if is_over:
            return
        time.sleep(0.2)


async def mean_return(served: Ring, settings: TrainSettings, version: int, seed: int) -> float:
    """Of 100 episodes."""
    async with HttpApi(served.url) as api:
        masked = settings.task == "cart-pole-masked"
        actor = Actor(api, "pole", network_of(settings))
        return await evaluate(actor, CartPole(100, [seed, _OTHER_STARTS], masked=masked), version)


def learn(seed: int, flags: list[str]) -> float:
    """One run; what its best version returns."""
    with tempfile.TemporaryDirectory() as folder, ring(Path(folder) / "ring") as served:
        where = ["--connect-to", served.url, "--run-dir", folder, "--seed", str(seed)]
        trainer = Process.start("trainer", "--config", RECIPE, *where, *flags)
        lines: list[PpoLine] = []
        try:
            for line in lines_of(trainer, Path(folder) / "pole" / "metrics.jsonl"):
                lines.append(line)
                told = "    -" if line.mean_return is None else f"{line.mean_return:5.1f}"
                measured = "" if line.evaluated is None else f", 100 episodes {line.evaluated:.1f}"
                print(f"  step {line.step:3}, {line.environment_steps:7,} steps: {told}{measured}", flush=True)
            assert trainer.wait() == 0, trainer.output
        finally:
            trainer.stop()
        last = lines[-1]
        best = max(lines, key=lambda line: line.evaluated or 0)
        settings = load(TrainSettings, ["--config", RECIPE, *flags])
        found = asyncio.run(mean_return(served, settings, best.version, seed))
        acting = np.sum([line.act_s for line in lines])
        print(
            f"seed {seed}: pole@{best.version} returns {found:.1f} of 500 in 100 other episodes, aim {AIM:.0f}; "
            f"{last.step} train steps, {last.environment_steps:,} environment steps in {last.seconds:.0f} s, "
            f"{last.environment_steps / acting:,.0f} a second of acting; "
            f"{sum(line.off_policy for line in lines)} off-policy",
            flush=True,
        )
        return found


def main() -> int:
    """A run for each seed; 1 when one of them stays below the aim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args, flags = parser.parse_known_args()
    return 1 if min([learn(seed, flags) for seed in args.seeds]) < AIM else 0


if __name__ == "__main__":
    sys.exit(main())
