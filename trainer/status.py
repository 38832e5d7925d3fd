"""From a run's state to what its board shows: plain messages out of plain data."""

import time

from shared.training import TrainerState, TrainerStatus, TrainingPoint
from trainer.checkpoint import CheckpointStore
from trainer.metrics import StepMetrics, updates_per_s
from trainer.settings import TrainSettings
from trainer.state import RunState


def status_of(
    settings: TrainSettings,
    state: RunState,
    now: TrainerState,
    last: StepMetrics | None,
    checkpoints: CheckpointStore,
    started_ms: int,
) -> TrainerStatus:
    """The totals and the last train step; owner and heartbeat are the board's to fill in."""
    return TrainerStatus(
        policy=settings.adapter,
        run=settings.run_name,
        owner="",
        model=settings.model,
        source=settings.source,
        state=now,
        started_ms=started_ms,
        last_update_ms=state.last_update_ms,
        train_step=state.train_step,
        policy_step=state.policy_step,
        version=state.version,
        best_version=state.best_version,
        best_reward=state.best_reward,
        held_out=state.held_out,
        reward=last.reward if last else None,
        loss=last.loss if last else None,
        kl=last.kl if last else None,
        lag=last.lag_max if last else 0,
        trajectories=state.trajectories,
        tokens=state.tokens,
        updates=state.updates,
        swaps=state.swaps,
        rejected=state.rejected,
        rollbacks=state.rollbacks,
        checkpoint_saves=state.saves,
        updates_per_s=updates_per_s(state),
        tokens_per_s=last.tokens_per_s if last else 0.0,
        checkpoints=tuple(checkpoints.names()),
        latest_checkpoint=checkpoints.pointer("latest") or "",
        best_checkpoint=checkpoints.pointer("best") or "",
    )


def point_of(metrics: StepMetrics) -> TrainingPoint:
    """A line of metrics.jsonl as a point on the curves."""
    same = {name: getattr(metrics, name) for name in TrainingPoint.__struct_fields__ if hasattr(metrics, name)}
    return TrainingPoint(**same, at_ms=time.time_ns() // 1_000_000)
