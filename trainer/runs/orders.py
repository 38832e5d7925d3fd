"""Carrying out what users ask of a running trainer, between two train steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from shared.errors import ConflictError, InvalidRequestError, ParallmError
from shared.redis.training.orders import Received
from shared.training import (
    Answer,
    CheckpointAnswer,
    Order,
    Refusal,
    ResumeOrder,
    UpdateAnswer,
    UpdateOrder,
    UpdateOutcome,
)
from shared.trajectories import LiveTrajectory
from trainer.learn.batches import DroppedCounts
from trainer.ring.mailbox import RingMailbox
from trainer.rollouts.live import posted_groups
from trainer.runs.inbox import GroupBatch
from trainer.runs.metrics import StepMetrics, Timing
from trainer.settings import TrainSettings
from trainer.state import RunState

log = structlog.get_logger()

ORDERS_REMEMBERED = 64


@dataclass(frozen=True)
class TrainedStep:
    """Result of a train step, for the answer to an order."""

    metrics: StepMetrics
    dropped: DroppedCounts
    samples: int  # in the loss
    learned: bool  # whether there was anything to learn from


class OrderedRun(Protocol):
    """Interface of a run that carries out orders (`trainer.runs.loop.TrainLoop`)."""

    settings: TrainSettings
    state: RunState

    @property
    def held(self) -> str:
        """Why nothing may be learned now; "" when something may."""

    async def compare(self, trajectories: Sequence[LiveTrajectory]) -> int:
        """Refuse posted log-probabilities that are not their version's; how many could not be compared."""

    async def train_step(self, batch: GroupBatch, timing: Timing, *, serve: bool = True) -> TrainedStep:
        """Train on a batch; with `serve`, serve the result."""

    async def save(self, name: str = "") -> str:
        """Save a checkpoint; its name."""


async def carry_out(loop: OrderedRun, mailbox: RingMailbox, received: Received[Order], timing: Timing) -> bool:
    """Do it and answer; True when a checkpoint was saved. An order that cannot be carried out changes nothing."""
    order = received.body
    answer: Answer
    try:
        if isinstance(order, UpdateOrder):
            answer = await _update(loop, received.id, order, timing)
        elif isinstance(order, ResumeOrder):
            raise ConflictError("training is not paused: the policy's latest version is this run's own")
        else:
            answer = CheckpointAnswer(await loop.save(order.name), loop.state.train_step)
    except ParallmError as error:
        log.warning("order.refused", order=received.id, reason=error.message)
        answer = Refusal.of(error)
    saved = bool(isinstance(answer, CheckpointAnswer) or (isinstance(answer, UpdateAnswer) and answer.checkpoint))
    # Only a checkpoint keeps what was learned: until then the order stays, for the case that we are killed.
    learned = isinstance(answer, UpdateAnswer) and answer.status == "updated"
    await mailbox.answer(received, answer, keep=learned and not saved)
    return saved


async def _update(loop: OrderedRun, order_id: str, order: UpdateOrder, timing: Timing) -> UpdateAnswer:
    if loop.held:
        raise ConflictError(f"training is paused: {loop.held}")
    _check_lag(loop, order)
    _check_advantages(loop, order)
    unchecked = await loop.compare(order.trajectories)
    state = loop.state
    batch = GroupBatch(posted_groups(order.trajectories), "posted")
    stepped = await loop.train_step(batch, timing, serve=order.update_inference)
    metrics, dropped = stepped.metrics, stepped.dropped
    status: UpdateOutcome = "rejected" if metrics.gate else "updated" if stepped.learned else "no_signal"
    state.orders = [*state.orders, order_id][-ORDERS_REMEMBERED:]
    checkpoint = ""
    if status == "updated" and order.checkpoint_name:
        checkpoint = await loop.save(order.checkpoint_name)
    reasons = {
        "equal_rewards": dropped.zero_variance,
        "nothing_to_compare_with": dropped.too_few,
        "failed": dropped.failed,
        "overlong": dropped.overlong,
    }
    return UpdateAnswer(
        status=status,
        train_step=metrics.train_step,
        policy_step=state.policy_step,
        version=state.version,
        served=status == "updated" and order.update_inference,
        trajectories=stepped.samples,
        dropped={reason: count for reason, count in reasons.items() if count},
        reward=metrics.reward,
        loss=metrics.loss if stepped.learned else None,
        kl=metrics.kl if stepped.learned else None,
        gate=metrics.gate,
        checkpoint=checkpoint,
        unchecked=unchecked,
    )


def _check_advantages(loop: OrderedRun, order: UpdateOrder) -> None:
    """Refuse what a run with a value head cannot learn from."""
    if loop.settings.loss == "ppo" and any(each.advantage is not None for each in order.trajectories):
        message = "this run learns by PPO, whose values say what was to be expected: give rewards, and no 'advantage'"
        raise InvalidRequestError(message, param="trajectories")


def _check_lag(loop: OrderedRun, order: UpdateOrder) -> None:
    """Too many unserved updates would make everything that workers sample too old to learn from, for ever."""
    state, settings = loop.state, loop.settings
    if order.update_inference or settings.source == "posted" or state.unpublished < settings.max_lag:
        return
    raise ConflictError(
        f"{state.unpublished} updates are not served and max_lag is {settings.max_lag}: what workers sample would be "
        "too old to learn from; send update_inference true"
    )
