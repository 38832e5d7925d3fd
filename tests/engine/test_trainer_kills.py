"""kill -9 of a run in a process of its own, at random moments, resumed each time."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.metrics import read

KILLS = int(os.environ.get("PARALLM_TEST_KILLS", "1"))
RECIPE = """
task: arithmetic
task_count: 8
steps: {steps}
prompts_per_step: 4
group_size: 8
max_tokens: 5
learning_rate: 0.001
max_lag: 0
parity_every: 0
checkpoint_every: 2
"""


def start(recipe: Path, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.training.run", str(recipe), "--run-dir", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.timeout(600)
def test_killed_and_resumed_a_run_ends_with_the_same_bytes(tmp_path: Path) -> None:
    steps = 4 + 4 * KILLS
    recipe = tmp_path / "run.yaml"
    recipe.write_text(RECIPE.format(steps=steps))
    assert start(recipe, tmp_path / "whole").wait() == 0
    metrics = tmp_path / "killed" / "policy" / "metrics.jsonl"
    rng = random.Random(0)
    for kill in range(KILLS):
        run = start(recipe, tmp_path / "killed")
        enough = rng.randint(1, 4) + 4 * kill
        while run.poll() is None and len(read(metrics)) < enough:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.1)
        assert run.poll() is None, "the run ended before it could be killed"
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    assert start(recipe, tmp_path / "killed").wait() == 0
    lines = read(metrics)
    assert [line.train_step for line in lines] == list(range(steps))
    assert [index for line in lines for index in line.indices] == list(range(4 * steps)), "each group exactly once"
    assert [line.loss for line in lines] == [line.loss for line in read(tmp_path / "whole/policy/metrics.jsonl")]
    name = f"policy/checkpoints/step-{steps:06d}/adapters.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
