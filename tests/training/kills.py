"""kill -9 of `mlx_parallm_train` on a real ring, at random moments, resumed each time.

    python -m tests.training.kills --kills 20

Proves, in one ring: every group of trajectories is consumed exactly once (with K = 1: or dropped because it was too
old, and counted), and with K = 0, a fixed seed and `ratio: trainer` (docs/operate/training.md) the adapter's bytes
are those of a run that nobody interrupted. With `--chats` clients stream chats meanwhile, so that rollouts decode in
other batches each time.
"""

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from api.demo.chats import ChatLog, chatting
from tests.e2e.rings import MODEL, Process, Ring, ring
from tests.waiting import HANG_S
from trainer.learn.options import LossName
from trainer.runs.metrics import StepMetrics, read
from trainer.state import RunState

RECIPE = """
task: arithmetic
task_count: 8
loss: {loss}
steps: {steps}
prompts_per_step: {groups}
group_size: 8
max_tokens: 5
learning_rate: 0.001
ratio: trainer
max_lag: {max_lag}
parity_every: 5
evaluate_every: 4
evaluate_prompts: 8
checkpoint_every: 2
probe_prompts: 2
"""
GROUPS = 4


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    lines: list[StepMetrics]
    state: RunState
    adapter: bytes

    @property
    def consumed(self) -> list[int]:
        """Indices of groups in the order in which train steps took them."""
        return [index for line in self.lines for index in line.indices]


def train(
    served: Ring,
    folder: Path,
    name: str,
    *,
    steps: int,
    max_lag: int,
    kills: int = 0,
    seed: int = 0,
    loss: LossName = "dapo",
    learner: str = "own",
    trainers: int = 1,
) -> Outcome:
    """Run to the end under a policy's name of its own, killed so many times on the way."""
    recipe = folder / f"{name}.yaml"
    text = RECIPE.format(loss=loss, steps=steps, groups=GROUPS, max_lag=max_lag)
    recipe.write_text(text + f"learner: {learner}\ntrainers: {trainers}\n")
    run = folder / name
    metrics = run / "metrics.jsonl"
    draw = random.Random(seed)
    for _ in range(kills):
        trainer = _start(served, recipe, folder, name)
        _kill_at_random(trainer, metrics, draw)
    trainer = _start(served, recipe, folder, name)
    assert trainer.wait() == 0, trainer.output
    trainer.stop()
    checkpoint = run / "checkpoints" / f"step-{steps:06d}"
    state = msgspec.json.decode((checkpoint / "state.json").read_bytes(), type=RunState)
    return Outcome(read(metrics), state, (checkpoint / "adapters.safetensors").read_bytes())


def check(outcome: Outcome, steps: int, *, on_policy: bool) -> None:
    """Each train step stands in the metrics once, and every group that was started is in exactly one place."""
    assert [line.train_step for line in outcome.lines] == list(range(steps))
    consumed, state = outcome.consumed, outcome.state
    assert len(consumed) == GROUPS * steps
    assert sorted([*consumed, *state.pending, *state.dropped]) == list(range(state.cursor)), "each in one place"
    assert sum(line.dropped for line in outcome.lines) == len(state.dropped), "each dropped one is counted"
    assert not (on_policy and state.dropped)


def _start(served: Ring, recipe: Path, folder: Path, name: str) -> Process:
    arguments = ("--connect-to", served.redis_url, "--model", f"models/{MODEL}", "--config", str(recipe))
    return Process.start("trainer", *arguments, "--run-dir", str(folder), "--adapter", name, "--log-json", "true")


def _kill_at_random(trainer: Process, metrics: Path, draw: random.Random) -> None:
    """After up to three further train steps and a moment; one in four while it starts."""
    known = len(read(metrics))
    deadline = time.monotonic() + HANG_S
    if draw.random() < 0.25:
        _pause(draw.random() * 4)
    else:
        wanted = known + draw.randint(1, 3)
        # A resumed run first cuts the lines that its checkpoint does not know.
        while trainer.popen.poll() is None and len(trainer.printed('"train.step"')) < wanted - known:
            _pause(0.01)
            assert time.monotonic() < deadline, trainer.output
        _pause(draw.random() * 0.4)
    assert trainer.popen.poll() is None, f"the run ended before it could be killed:\n{trainer.output}"
    trainer.stop(signal.SIGKILL)


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


@contextlib.contextmanager
def _chats(served: Ring, on: bool) -> Iterator[ChatLog]:
    """Chats on the base model from another thread, until the block ends."""
    log, over = ChatLog(), threading.Event()

    async def chat() -> None:
        async with chatting(served.url, (MODEL, MODEL), 0.05, time.monotonic()) as going:
            log.chats = going.chats
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(chat(),)) if on else None
    if thread is not None:
        thread.start()
    try:
        yield log
    finally:
        over.set()
        if thread is not None:
            thread.join()


def main() -> int:
    """Both runs of K = 0, then one of K = 1; 0 when all of it holds."""
    parser = argparse.ArgumentParser(prog="python -m tests.training.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loss", default="dapo")
    parser.add_argument("--chats", action="store_true")
    arguments = parser.parse_args()
    steps = 4 * arguments.kills
    with tempfile.TemporaryDirectory(prefix="parallm-kills-") as name, ring(Path(name) / "ring") as served:
        folder = Path(name)
        whole = train(served, folder, "whole", steps=steps, max_lag=0, loss=arguments.loss)
        check(whole, steps, on_policy=True)
        print(f"uninterrupted, K = 0: {steps} train steps")
        with _chats(served, arguments.chats) as log:
            for max_lag in (0, 1):
                killed = train(
                    served, folder, f"killed-{max_lag}", steps=steps, max_lag=max_lag,
                    kills=arguments.kills, seed=arguments.seed + max_lag, loss=arguments.loss,
                )  # fmt: skip
                check(killed, steps, on_policy=max_lag == 0)
                print(
                    f"K = {max_lag}: {arguments.kills} kills, {steps} train steps, "
                    f"{len(killed.consumed)} groups consumed once, {len(killed.state.dropped)} dropped as too old"
                )
                if max_lag == 0:
                    same = [line.loss for line in killed.lines] == [line.loss for line in whole.lines]
                    print(f"  same losses: {same}, same adapter bytes: {killed.adapter == whole.adapter}")
                    assert killed.adapter == whole.adapter
        print(f"chats meanwhile: {len(log.chats)}, broken: {len(log.broken)}")
        assert not log.broken, log.broken[0].error
    return 0


if __name__ == "__main__":
    sys.exit(main())
