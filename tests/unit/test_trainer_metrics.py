from pathlib import Path

from tests.unit.trainer_samples import group, trajectory
from trainer.learn.batches import Dropped
from trainer.learn.steps import StepReport
from trainer.metrics import MetricsLog, Timing, read, step_metrics
from trainer.state import RunState


def write(log: MetricsLog, step: int) -> None:
    batch = [group(trajectory(1.0), trajectory(0.0))]
    state = RunState("run", train_step=step + 1, version=step)
    report = StepReport(updated=True, loss=float(step))
    log.write(step_metrics(state, batch, report, Dropped(), Timing(1, 2, 1), [1], stale=0, held_out=None, gate=""))


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
