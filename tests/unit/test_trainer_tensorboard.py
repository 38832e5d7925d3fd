import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from tests.unit.trainer_samples import group, trajectory
from trainer.learn.batches import DroppedCounts
from trainer.learn.steps import StepReport
from trainer.runs.metrics import MetricsLog, Timing, step_metrics
from trainer.state import RunState

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def write(log: MetricsLog, step: int, loss: float) -> None:
    state = RunState("run", train_step=step + 1, version=step)
    batch = [group(trajectory(1.0), trajectory(0.0))]
    report = StepReport(updated=True, loss=loss)
    log.write(
        step_metrics(state, batch, report, DroppedCounts(), Timing(1, 2, 1), [1], stale=0, held_out=None, gate="")
    )


def events(folder: Path) -> list[Event]:
    """TFRecords: length (8 bytes), its crc (4), an event, its crc (4)."""
    found: list[Event] = []
    for path in sorted(folder.glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            found.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
    return found


def test_every_measured_figure_of_a_train_step_is_a_scalar(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run/metrics.jsonl", tensorboard=tmp_path / "board")
    write(log, 0, 0.25)
    write(log, 1, float("nan"))
    log.close()
    scalars = {(e.step, v.tag): v.simple_value for e in events(tmp_path / "board") for v in e.summary.value}
    assert scalars[0, "policy/loss"] == 0.25
    assert scalars[1, "rollout/reward"] == 0.5
    assert scalars[1, "staleness/lag_max"] == 1
    assert (1, "policy/loss") not in scalars, "not finite: not drawn"
    assert (0, "rollout/held_out") not in scalars, "not measured: not drawn"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_resumed_run_hides_what_the_killed_one_wrote(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run/metrics.jsonl", tensorboard=tmp_path / "board")
    write(log, 0, 0.1)
    write(log, 1, 0.2)
    log.close()
    MetricsLog(tmp_path / "run/metrics.jsonl", first_step=1, tensorboard=tmp_path / "board").close()
    starts = [e.step for e in events(tmp_path / "board") if e.session_log.status == SessionLog.START]
    assert starts[-1] == 1
