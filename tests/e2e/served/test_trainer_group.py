"""A trainer of two ranks on a real ring: its versions are a worker's, and the death of a rank loses nothing."""

import json
import os
import re
import signal
from pathlib import Path

import httpx

from tests.e2e.rings import MODEL, Process, Ring
from tests.e2e.served.test_group import alive, children
from trainer.runs.metrics import read

STEPS = 400  # more than it takes before it is told to end


def trained(served: Ring, folder: Path, *arguments: str) -> Process:
    return Process.start(
        "trainer", "--connect-to", served.url, "--model", f"models/{MODEL}", "--adapter", "ranks", "--num-local-ranks",
        "2", "--steps", str(STEPS), "--prompts-per-step", "4", "--group-size", "4", "--max-tokens", "8",
        "--learning-rate", "1e-3", "--checkpoint-every", "1", "--parity-every", "1", "--evaluate-every", "0",
        "--run-dir", str(folder), "--log-json", "true", "--distributed-silence-s", "2", *arguments,
    )  # fmt: skip


def test_ranks_learn_one_version_and_go_on_after_the_death_of_one(served: Ring, tmp_path: Path) -> None:
    metrics = tmp_path / "ranks" / "metrics.jsonl"
    first = trained(served, tmp_path)
    try:
        first.wait_for_line('"step": "2/.*"train.step"')
        (follower,) = children(first.popen.pid)
        os.kill(follower, signal.SIGKILL)
        assert first.wait() == 1, first.output
        assert re.search(r"mlx_parallm_train: the group is lost: rank 1", first.output), first.output
        assert not alive(follower)
    finally:
        first.stop(signal.SIGKILL)
    again = trained(served, tmp_path)
    try:
        again.wait_for_line(r'"train\.step"')
        (follower,) = children(again.popen.pid)
        os.kill(follower, signal.SIGTERM)  # as mlx.launch tells every rank
        assert again.wait() == 0, again.output
        assert again.wait_for_line('"train_step": [12], .*"run.resumed"') and again.printed(
            "another rank got a signal to end"
        )
    finally:
        again.stop(signal.SIGKILL)
    steps = [line.train_step for line in read(metrics)]
    assert steps == list(range(len(steps))) and len(steps) > 1, "none is lost that has a checkpoint"
    described = httpx.get(f"{served.url}/v1/adapters/ranks").json()
    checks = {(check["name"], check["passed"]) for version in described["versions"] for check in version["gate"]}
    assert described["latest"] and ("reload_parity", True) in checks, "a worker says what the ranks say"


def test_ranks_distil_from_what_an_api_says(served: Ring, tmp_path: Path) -> None:
    lines = [{"prompt": f"{a}+{a + 1}=", "completion": str(2 * a + 1)} for a in range(12)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = Process.start(
        "trainer", "--mode", "distill", "--connect-to", served.url, "--teacher", MODEL, "--model", f"models/{MODEL}",
        "--dataset", str(tmp_path / "sums.jsonl"), "--adapter", "student", "--num-local-ranks", "2", "--steps", "1",
        "--run-dir", str(tmp_path), "--log-json", "true",
    )  # fmt: skip
    try:
        assert run.wait() == 0, run.output
    finally:
        run.stop(signal.SIGKILL)
    steps = [json.loads(line) for line in run.printed('"train.step"')]
    assert steps[-1]["step"] == "1/1" and steps[-1]["loss"] < 1e-4, (
        "ranks say what a worker of the same weights has said"
    )
