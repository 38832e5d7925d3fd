import json
import resource
from pathlib import Path

import msgspec
import pytest

from shared.training import BoardSample
from tests.unit.trainer_samples import group, trajectory
from trainer.learn.batches import DroppedCounts
from trainer.learn.steps import StepReport
from trainer.runs.metrics import MetricsLog, StepMetrics, Timing, append, clock, progress, read, step_metrics
from trainer.state import RunState


def metrics(step: int, dropped: DroppedCounts = DroppedCounts()) -> StepMetrics:  # noqa: B008 - frozen
    batch = [group(trajectory(1.0), trajectory(0.0))]
    state = RunState("run", train_step=step + 1, version=step)
    report = StepReport(updated=True, loss=float(step))
    return step_metrics(state, batch, report, dropped, Timing(1, 2, 1), [1], stale=0, held_out=None, gate="")


def write(log: MetricsLog, step: int) -> None:
    log.write(metrics(step), (BoardSample(1.0, "prompt", f"reply {step}"),))


def test_after_a_resume_every_train_step_stands_there_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(5):
        write(log, step)
    log.close()
    with path.open("ab") as torn:
        torn.write(b'{"train_step": 5, "rew')  # killed in the middle of a line
    log = MetricsLog(path, first_step=3)  # the checkpoint knew steps 0 to 2
    write(log, 3)
    log.close()
    lines = read(path)
    assert [line.train_step for line in lines] == [0, 1, 2, 3]
    assert lines[0].reward == 0.5
    assert lines[0].tokens_per_s == 1.0
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_bytes().splitlines()]
    assert [line["samples"][0]["completion"] for line in samples] == [f"reply {step}" for step in range(4)]


def test_the_progress_line_says_what_taught_and_how_long_the_rest_takes() -> None:
    line = progress(metrics(2, DroppedCounts(zero_variance=1, overlong=5, failed=3)), 40, 3 * 3600 + 5 * 60)
    expected = {"step": "3/40", "taught": "0/1", "zero_variance": 1, "overlong": 5, "failed": 3, "eta": "3:05:00"}
    assert line.items() >= expected.items()
    endless = progress(metrics(2), 0, None)
    assert endless["step"] == 3 and not {"eta", "failed"} & endless.keys()
    assert [clock(seconds) for seconds in (0.4, 59.6, 3599.7)] == ["0:00:00", "0:01:00", "1:00:00"]


class _Line(msgspec.Struct):
    step: int
    said: str = "a" * 50


def test_a_line_that_a_full_disk_cuts_off_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, _Line(0))
    whole = path.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, before[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            append(path, _Line(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == whole
    append(path, _Line(1))
    assert [msgspec.json.decode(line)["step"] for line in path.read_bytes().splitlines()] == [0, 1]
