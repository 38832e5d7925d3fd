"""A night's run, interrupted again and again: killed with -9, and held by people who ask. Its bytes stay the same.

    python -m tests.training.night_kills --interruptions 50

Two runs learn from the same sessions of one ring, with the same seed: one is left alone, the other one is interrupted,
every second time by a kill. Both candidates have to be equal to the byte, and so have the optimizers.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.e2e.rings import Process, Ring, ring
from tests.training.simulated_user import SimulatedUser
from tests.training.wishes import Greeting
from tests.waiting import HANG_S
from trainer.versions.checkpoint import CheckpointStore
from trainer.versions.run_folder import interruptions

QUIET_S = 0.3  # in place of 20: what is measured is not how long a run waits
COPIED = ("teacher.jsonl", "learned_from.json")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interruptions", type=int, default=50)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as root:
        return compare(Path(root), options.interruptions, options.steps, options.seed)


def train(argv: list[str]) -> int:
    """`mlx_parallm_train`, which goes on soon after somebody has asked."""
    from trainer import __main__ as trainer
    from trainer.learn import learn_when

    learn_when.QUIET_S = QUIET_S
    return trainer.main(argv)


def compare(root: Path, wanted: int, steps: int, seed: int) -> int:
    """The exit code: 0 when both runs end with the same bytes."""
    with ring(root / "data", "--feedback-ttl-days", "1") as served:
        asyncio.run(_talk(served))
        suite = root / "suite.jsonl"
        lines = ({"prompt": each.question, "reference": each.answer} for each in Greeting().tasks(4, 1))
        suite.write_text("".join(json.dumps(line) + "\n" for line in lines))
        whole, pieces = (root / "runs" / name for name in ("whole", "pieces"))
        began = time.monotonic()
        assert Night(served, whole, suite, steps).start().wait() == 0, "the run that is left alone"
        alone_s = time.monotonic() - began
        pieces.mkdir()
        for name in COPIED:
            (pieces / name).write_bytes((whole / name).read_bytes())
        night = Night(served, pieces, suite, steps)
        kills, holds = night.interrupt(wanted, random.Random(seed))
        same = _bytes(whole) == _bytes(pieces)
        print(
            f"{kills} kills, {holds} requests, {interruptions(pieces)}; {steps} steps, alone in {alone_s:.0f} s, "
            f"interrupted in {time.monotonic() - began - alone_s:.0f} s; same bytes: {same}"
        )
    return 0 if same and kills + holds >= wanted else 1


async def _talk(served: Ring) -> None:
    async with SimulatedUser(served.url) as user:
        await user.talk(24)


class Night:
    """A run of `mlx_parallm_train` over one folder, as night school has it."""

    def __init__(self, served: Ring, folder: Path, suite: Path, steps: int) -> None:
        self._served, self._folder, self._steps = served, folder, steps
        self._arguments = [
            "--connect-to", served.url, "--model", "models/tiny", "--mode", "distill", "--dataset", "sessions:policy",
            "--teacher", "tiny", "--candidate", "--suite", str(suite), "--max-tokens", "4", "--reward-margin", "1",
            "--max-base-kl", "50", "--steps", str(steps), "--evaluate-every", str(max(1, steps // 4)),
            "--checkpoint-every", "2", "--prompts-per-step", "8", "--learning-rate", "3e-4", "--learn-when", "idle",
            "--run-dir", str(folder.parent), "--run", folder.name,
        ]  # fmt: skip

    def start(self) -> Process:
        return Process.start("tests.training.night_kills", "--trainer", *self._arguments)

    def interrupt(self, wanted: int, draw: random.Random) -> tuple[int, int]:
        """Run to the end; how often it was killed, and how often somebody asked meanwhile."""
        kills = holds = 0
        process = self.start()
        while process.popen.poll() is None or process.popen.returncode == -signal.SIGKILL:
            if process.popen.poll() is not None:
                process.stop()
                process = self.start()
                continue
            if kills + holds < wanted and self._has_moved(process, draw):
                if kills <= holds:
                    process.popen.send_signal(signal.SIGKILL)
                    process.popen.wait(HANG_S)
                    kills += 1
                else:
                    self._ask()
                    holds += 1
            time.sleep(0.02)
        code = process.stop()
        assert code == 0, f"exit code {code}:\n{process.output}"
        return kills, holds

    def _has_moved(self, process: Process, draw: random.Random) -> bool:
        """Wait until the run has made a few steps since its last start, or has ended; then some milliseconds more."""
        before, more = self._lines(), draw.randint(1, 3)
        deadline = time.monotonic() + HANG_S
        while self._lines() < before + more and process.popen.poll() is None:
            assert time.monotonic() < deadline, f"the run stands still:\n{process.output[-4000:]}"
            time.sleep(0.01)
        time.sleep(draw.random() * 0.1)
        return process.popen.poll() is None

    def _lines(self) -> int:
        file = self._folder / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def _ask(self) -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "count to nine"}], "max_tokens": 32}
        httpx.post(f"{self._served.url}/v1/chat/completions", json=body, timeout=HANG_S).raise_for_status()


def _bytes(folder: Path) -> tuple[object, ...]:
    """Weights of the candidate, and weights and moments of the last checkpoint."""
    last = CheckpointStore(folder / "checkpoints").load()
    assert last is not None
    candidate = folder / "versions" / str(last.state.version) / "adapters.safetensors"
    checkpoint = folder / "checkpoints" / f"step-{last.state.train_step:06d}"
    files = [candidate, checkpoint / "adapters.safetensors", checkpoint / "optimizer.safetensors"]
    return last.state.train_step, *(file.read_bytes() for file in files)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trainer"]:
        sys.exit(train(sys.argv[2:]))
    sys.exit(main())
