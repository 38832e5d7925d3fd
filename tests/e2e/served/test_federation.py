"""`--federation`: two runs of a real ring average their weights, and one of them is killed (kill -9) on the way."""

import json
import signal
from pathlib import Path

from tests.e2e.rings import MODEL, Process, Ring
from trainer.runs.metrics import read

RECIPE = """
task: arithmetic
steps: 6
prompts_per_step: 4
group_size: 8
max_tokens: 5
learning_rate: 0.001
max_lag: 0
parity_every: 0
evaluate_every: 0
checkpoint_every: 1
probe_prompts: 2
federation: both
sync_every: 2
sync_wait_s: 60
"""


def started(served: Ring, folder: Path, name: str, seed: int) -> Process:
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    arguments = (
        "--redis",
        served.redis_url,
        "--model",
        f"models/{MODEL}",
        "--config",
        str(recipe),
        "--seed",
        str(seed),
    )
    return Process.start("trainer", *arguments, "--run-dir", str(folder), "--adapter", name, "--log-json", "true")


def test_a_run_that_is_killed_costs_its_change_and_comes_back(served: Ring, tmp_path: Path) -> None:
    one, other = (started(served, tmp_path, name, seed) for seed, name in enumerate(("one", "other")))
    again = None
    try:
        other.wait_for_line(r'"train\.step"')
        other.stop(signal.SIGKILL)
        again = started(served, tmp_path, "other", 1)
        for process in (one, again):
            assert process.wait() == 0, process.output
        rounds = [json.loads(line) for line in one.printed('"round.over"')]
        assert [line["counted"] for line in rounds] == [True, True, True]
        assert [line["round"] for line in rounds] == sorted({line["round"] for line in rounds})
        assert again.printed('"round.over"')
        for name in ("one", "other"):
            assert [line.train_step for line in read(tmp_path / name / "metrics.jsonl")] == list(range(6))
    finally:
        for process in filter(None, (one, other, again)):
            process.stop(signal.SIGKILL)
