import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.rings import ROOT
from tests.waiting import HANG_S


def test_the_demo_chats_runs_two_jobs_and_writes_its_report(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "api.demo", "--out", str(tmp_path), "--learning-seconds", "5"],
        cwd=ROOT,
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
    assert learning["train_steps"] >= 10 and learning["chats"]["streamed"] > 10
    assert learning["chats"]["broken"] == []
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
