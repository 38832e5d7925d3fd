"""The report of a run: one JSON line a train step, always, and one line for a person.

Invariant: after a resume the file holds each train step once. Lines of steps that the checkpoint does not know are cut
off before the first new one is written.
"""

import contextlib
import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog

from shared.ranks import RankStatus
from shared.training import BoardSample, TrainerState, TrainerStatus, TrainingPoint
from trainer.learn.batches import DroppedCounts
from trainer.learn.steps import StepReport
from trainer.loggers.loggers import Loggers
from trainer.loggers.tensorboard import TensorBoardLog
from trainer.rollouts.curriculum import CurriculumFigures
from trainer.rollouts.groups import RolloutGroup
from trainer.rollouts.held_out import Evaluated
from trainer.settings import TrainSettings
from trainer.state import RunState
from trainer.versions.checkpoint import CheckpointStore

log = structlog.get_logger()

PACES = 20  # train steps whose pace gives the estimate of the remaining time


class StepMetrics(msgspec.Struct, frozen=True):
    """One line of metrics.jsonl. Means are over samples, unless noted as over tokens."""

    train_step: int
    policy_step: int
    version: int  # that is served after this step
    reward: float  # mean over the batch
    reward_std: float
    groups: int
    taught: int  # groups in the loss
    zero_variance: int
    failed: int
    overlong: int
    dropped: int  # groups dropped since the last step: stale, or past their deadline
    lag_mean: float
    lag_max: int
    completion_tokens: float  # mean
    loss: float | None  # None: not finite
    learning_rate: float
    grad_norm: float
    update_rms: float
    entropy: float  # mean over tokens, nats
    clip_fraction: float  # of tokens
    kl: float  # k3 to the base, mean over tokens
    mismatch: float | None  # mean |logpi_v - logmu| over tokens; None: not measured in this step
    mismatch_max: float | None
    staleness: float | None  # mean |logpi_theta - logpi_v|
    staleness_max: float | None
    held_out: float | None  # mean reward on held-out tasks; None: not evaluated in this step
    gate: str  # "" when the version passed, else the failed checks
    tokens: int  # in the loss
    tokens_per_s: float  # completion tokens of the batch per second of the whole step
    wait_s: float  # for the batch
    train_s: float
    publish_s: float
    seconds: float  # since the run began, over all resumes
    indices: tuple[int, ...]  # of the groups of our own prompts that this step consumed
    source: str = "prompts"  # where the batch came from: prompts, live, posted
    tasks: tuple[int, ...] = ()  # of these groups, where a curriculum has chosen them
    tasks_solved: float | None = None  # share of all tasks, by what each earned last; None: no curriculum
    tasks_hopeless: float | None = None
    tasks_unseen: float | None = None
    difficulty: float | None = None  # mean place of the batch's tasks among all; None: no curriculum that knows it
    wanted_difficulty: float | None = None  # of the next ones
    value_loss: float | None = None  # of a value head's numbers, half the mean square; None: there is no such head
    explained: float | None = None  # share of the variance of the returns that the values had predicted
    held_out_true: float | None = None  # mean of `--held-out-reward`; None: there is none, or not evaluated


def updates_per_s(state: RunState) -> float:
    """Policy steps per second that the run has trained."""
    return state.updates / state.seconds if state.seconds else 0.0


@dataclass
class Timing:
    """Seconds of one train step."""

    wait_s: float = 0.0  # for the batch
    train_s: float = 0.0
    publish_s: float = 0.0

    @property
    def whole_s(self) -> float:
        """Seconds of waiting, training and publishing together."""
        return self.wait_s + self.train_s + self.publish_s


def step_metrics(
    state: RunState,
    batch: Sequence[RolloutGroup],
    report: StepReport,
    dropped: DroppedCounts,
    timing: Timing,
    lags: Sequence[int],
    *,
    stale: int,
    held_out: Evaluated | None,
    gate: str,
    source: str = "prompts",
    curriculum: CurriculumFigures | None = None,
) -> StepMetrics:
    """The line of the train step that was just counted in `state`."""
    distances = report.distances
    rewards = [reward for group in batch for reward in group.rewards]
    lengths = [len(t.completion_ids) for group in batch for t in group.trajectories]
    return StepMetrics(
        train_step=state.train_step - 1,
        policy_step=state.policy_step,
        version=state.version,
        reward=float(np.mean(rewards)) if rewards else 0.0,
        reward_std=float(np.std(rewards)) if rewards else 0.0,
        groups=len(batch),
        taught=len(batch) - dropped.zero_variance - dropped.too_few - dropped.cut_off,
        zero_variance=dropped.zero_variance,
        failed=dropped.failed,
        overlong=dropped.overlong,
        dropped=stale,
        lag_mean=float(np.mean(lags)),
        lag_max=max(lags),
        completion_tokens=float(np.mean(lengths)) if lengths else 0.0,
        loss=_finite(report.loss),
        learning_rate=report.learning_rate,
        grad_norm=report.grad_norm,
        update_rms=report.update_rms,
        entropy=report.entropy,
        clip_fraction=report.clip_fraction,
        kl=report.kl,
        mismatch=distances.mismatch_mean if distances else None,
        mismatch_max=distances.mismatch_max if distances else None,
        staleness=distances.staleness_mean if distances else None,
        staleness_max=distances.staleness_max if distances else None,
        value_loss=_finite(report.value_loss),
        explained=_finite(report.explained),
        held_out=None if held_out is None else held_out.reward,
        held_out_true=None if held_out is None else held_out.true,
        gate=gate,
        tokens=report.tokens,
        tokens_per_s=sum(lengths) / timing.whole_s if timing.whole_s else 0.0,
        wait_s=timing.wait_s,
        train_s=timing.train_s,
        publish_s=timing.publish_s,
        seconds=state.seconds,
        indices=tuple(group.index for group in batch if group.index >= 0),
        source=source,
        **({} if curriculum is None else asdict(curriculum)),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class SampleLine(msgspec.Struct, frozen=True):
    """A line of `samples.jsonl`: a train step's samples."""

    train_step: int
    samples: tuple[BoardSample, ...]


class MetricsLog:
    """Appends to `metrics.jsonl` and `samples.jsonl`, and passes figures to TensorBoard's files and loggers."""

    def __init__(
        self, path: Path, *, first_step: int = 0, tensorboard: Path | None = None, loggers: Loggers | None = None
    ) -> None:
        self._loggers = loggers
        self._curves = TensorBoardLog(tensorboard, first_step) if tensorboard is not None else None
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._samples = path.with_name("samples.jsonl")
        for file in (path, self._samples):
            cut(file, "train_step", first_step)
        self._file = path.open("ab", buffering=0)

    def write(self, metrics: StepMetrics, samples: tuple[BoardSample, ...] = ()) -> None:
        """One line, visible to readers at once; on an OSError it is as if it had not been tried."""
        if samples:  # first: tried again after a full disk, they may stand there twice, and figures may not
            append(self._samples, SampleLine(metrics.train_step, samples))
        _add(self._file, msgspec.json.encode(metrics) + b"\n")
        values = msgspec.structs.asdict(metrics)
        if self._loggers is not None:
            self._loggers.write(metrics.train_step, values, samples)
        if self._curves is not None:
            try:
                self._curves.write(metrics.train_step, values)
            except OSError as error:  # it draws what this file has: the line counts
                log.warning("train.figures_not_drawn", reason=str(error))

    def close(self) -> None:
        """Close the files of metrics and curves."""
        self._file.close()
        if self._curves is not None:
            self._curves.close()


def append(path: Path, line: msgspec.Struct) -> None:
    """Add one line to the figures of a run that keeps no file open; on an OSError it is as if it had not been tried."""
    with path.open("ab", buffering=0) as file:
        _add(file, msgspec.json.encode(line) + b"\n")


def _add(file: FileIO, line: bytes) -> None:
    before = file.seek(0, os.SEEK_END)
    try:
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.name))
    except OSError:
        file.truncate(before)
        raise


def read(path: Path) -> list[StepMetrics]:
    """All whole lines of a metrics file."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=StepMetrics) for line in lines]


def progress(m: StepMetrics, steps: int, eta_s: float | None) -> dict[str, str | float]:
    """The fields of the progress line that a person reads."""
    fields: dict[str, str | float] = {
        "step": f"{m.train_step + 1}/{steps}" if steps else m.train_step + 1,
        "reward": round(m.reward, 3),
        "taught": f"{m.taught}/{m.groups}",
        "zero_variance": m.zero_variance,
        "overlong": m.overlong,
        "loss": "not finite" if m.loss is None else float(f"{m.loss:.3g}"),
        "kl": float(f"{m.kl:.3g}"),
        "entropy": round(m.entropy, 3),
        "lag": m.lag_max,
        "tok_per_s": round(m.tokens_per_s),
        "version": m.version,
    }
    if eta_s is not None:
        fields["eta"] = clock(eta_s)
    if m.failed:
        fields["failed"] = m.failed
    if m.held_out is not None:
        fields["held_out"] = round(m.held_out, 3)
    if m.held_out_true is not None:
        fields["held_out_true"] = round(m.held_out_true, 3)
    if m.gate:
        fields["rejected"] = m.gate
    return fields


class TimeLeft:
    """Estimates the remaining time of a run, at the pace of its last train steps."""

    def __init__(self) -> None:
        self._paces: deque[float] = deque(maxlen=PACES)

    def add(self, seconds: float) -> None:
        """Record the seconds of a train step."""
        self._paces.append(seconds)

    def of(self, steps: int, done: int) -> float | None:
        """Seconds until `steps` are done; None before the first train step, and without an end (0)."""
        return max(0, steps - done) * sum(self._paces) / len(self._paces) if self._paces and steps else None


def clock(seconds: float) -> str:
    """Format a duration as 3:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def figures(m: StepMetrics) -> dict[str, str | int | float]:
    """Attributes of a train step's span that describe its result."""
    attributes: dict[str, str | int | float] = {
        "parallm.policy_step": m.policy_step,
        "parallm.version": m.version,
        "parallm.reward": m.reward,
        "parallm.lag": m.lag_max,
        "parallm.tokens": m.tokens,
        "parallm.gate": m.gate,  # "" when the version passed
    }
    return attributes if m.loss is None else {**attributes, "parallm.loss": m.loss}


def cut(path: Path, field: str, first: int) -> None:
    """Drop the lines of a run's file whose step, in this field, is `first` or later, and what is no line of the run."""
    if not path.exists():
        return
    kept: list[bytes] = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)[field] < first:
                kept.append(line + b"\n")
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(b"".join(kept))
    temporary.replace(path)


_LAST_STEP = ("groups", "taught", "zero_variance", "overlong", "failed")  # figures of it that a status has


def status_of(
    settings: TrainSettings,
    state: RunState,
    now: TrainerState,
    last: StepMetrics | None,
    checkpoints: CheckpointStore,
    started_ms: int,
    ranks: tuple[RankStatus, ...],
    samples: tuple[BoardSample, ...],
    eta_s: float | None,
) -> TrainerStatus:
    """The totals and the last train step; owner and heartbeat are the board's to fill in."""
    own = {name: 0 if last is None else getattr(last, name) for name in _LAST_STEP}
    return msgspec.structs.replace(
        totals_of(settings, state, now, checkpoints, started_ms),
        **own,
        source=settings.source_shown,
        reward=last.reward if last else None,
        loss=last.loss if last else None,
        kl=last.kl if last else None,
        lag=last.lag_max if last else 0,
        tokens_per_s=last.tokens_per_s if last else 0.0,
        value_loss=last.value_loss if last else None,
        explained=last.explained if last else None,
        ranks=ranks,
        eta_s=eta_s,
        samples=samples,
    )


def totals_of(
    settings: TrainSettings, state: RunState, now: TrainerState, checkpoints: CheckpointStore, started_ms: int
) -> TrainerStatus:
    """The part of a status that all kinds of runs have."""
    return TrainerStatus(
        **_same(TrainerStatus, state) | {"mode": settings.mode},
        policy=settings.adapter,
        owner="",
        model=settings.model,
        state=now,
        started_ms=started_ms,
        steps=steps_of(settings),
        checkpoint_saves=state.saves,
        updates_per_s=updates_per_s(state),
        checkpoints=tuple(checkpoints.names()),
        latest_checkpoint=checkpoints.pointer("latest") or "",
        best_checkpoint=checkpoints.pointer("best") or "",
    )


def steps_of(settings: TrainSettings) -> int:
    """Train steps until the run ends by itself; 0: it does not."""
    return 0 if settings.source == "posted" else settings.steps


def point_of(metrics: StepMetrics) -> TrainingPoint:
    """A line of metrics.jsonl as a point on the curves."""
    return TrainingPoint(**_same(TrainingPoint, metrics), at_ms=time.time_ns() // 1_000_000)


def _same(kind: type[msgspec.Struct], source: object) -> dict[str, Any]:
    """The fields of this kind of message that the source has under the same names."""
    return {name: getattr(source, name) for name in kind.__struct_fields__ if hasattr(source, name)}
