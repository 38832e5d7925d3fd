import json
import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.rings import ROOT
from tests.waiting import HANG_S


def test_the_demo_chats_runs_two_jobs_and_writes_its_report(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "api.demo", "--out", str(tmp_path), "--learning-seconds", "1"],
        cwd=ROOT,
        env={**os.environ, "PARALLM_EVALUATE_EVERY": "3"},  # after which the last act ends
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32 pictures in one batch" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["jobs"]["arithmetic"]["samples"] == 64 * 8
    assert summary["jobs"]["gsm8k"]["samples"] == 64 * 2
    assert 0.1 < summary["jobs"]["arithmetic"]["mean_reward"] < 0.9
    assert len(summary["jobs"]["arithmetic"]["tokens_by_worker"]) == 2
    assert (tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "arithmetic.trajectories.jsonl").read_text().splitlines()) == 512
    learning = json.loads((tmp_path / "learning.json").read_text())
    assert 0 < learning["held_out"]["before"] < 0.8
    assert learning["train_steps"] >= 3 and learning["chats"]["streamed"] > 10
    assert learning["chats"]["broken"] == []
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_the_short_list_for_a_real_model_runs_to_its_end_with_the_tiny_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "api.demo.real", "--model", "models/tiny", "--out", str(tmp_path), "--steps", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert (tmp_path / "real.json").exists(), done.stdout + done.stderr
    figures = json.loads((tmp_path / "real.json").read_text())
    acts = {"ready", "chat", "stream", "tool, forced", "JSON schema", "embeddings", "job", "adapters", "SFT", "GRPO"}
    assert figures.keys() == acts, done.stdout + done.stderr
    assert figures["job"]["done"] == "64 of 64" and figures["adapters"]["whole"]
    unseen = {line.partition("not seen: ")[2] for line in done.stdout.splitlines() if "not seen: " in line}
    too_much = {"the answer names Paris", "a stream has tokens", "sentences of one meaning are nearer"}
    assert unseen <= too_much, "of a model that answers in few tokens"
