"""What a run is made of: a thread that computes, a model to train, a ring, and tasks."""

from dataclasses import dataclass, field
from typing import Any

from mlx_model.sites import Whole
from trainer.learn.compute import ComputeHost
from trainer.learners.federation import RoundHandle
from trainer.learners.handle import Handle, HostHandle
from trainer.learners.kinds import PolicyOptions, made_with
from trainer.learners.policy import PolicyLearner
from trainer.learners.shared import SharedHandle
from trainer.learners.shared_member import run_spec
from trainer.loggers.loggers import Loggers
from trainer.ring.ring import TrainerRing
from trainer.rollouts.conversation import ChatEncoder
from trainer.rollouts.environments import Environment
from trainer.rollouts.sight import Sight
from trainer.settings import TrainSettings


def policy_options(settings: TrainSettings) -> PolicyOptions:
    """Options of the run's learner."""
    return PolicyOptions(
        None if settings.head_only else settings.adapter_shape(),
        settings.optimize_options(),
        settings.limits(),
        seed=settings.seed,
        checkpoint_layers=settings.gradient_checkpointing,
        remembered=settings.max_lag + 1,
    )


@dataclass(frozen=True)
class Parts:
    """The parts of one run."""

    host: ComputeHost
    model: Any  # an mlx-lm model, which belongs to the host's thread; None where a service trains it
    ring: TrainerRing
    conversation: ChatEncoder
    environment: Environment
    held_out: Environment | None = None
    loggers: Loggers = field(default_factory=Loggers)
    sight: Sight | None = None  # of a model that sees
    whole: Whole | None = None  # where ranks divide the model: what it was before


async def open_learner(parts: Parts, settings: TrainSettings) -> Handle[PolicyLearner]:
    """The run's learner, where the settings want it; ValueError when the model has no layers for its adapter."""
    options, lead, place = policy_options(settings), parts.ring.lead, parts.ring.federation
    if parts.ring.learners is not None:
        return await parts.ring.learners.open(options, settings.run_name, settings.folder)
    mine: HostHandle[PolicyLearner] = await HostHandle.open(
        parts.host, made_with("policy", options), parts.model, parts.sight, parts.whole
    )
    if place is not None:
        return RoundHandle(mine, place, settings.sync_every)
    if lead is None:
        return mine
    await lead.begin(run_spec(settings, options, parts.ring.model, parts.ring.base_sha256))
    return SharedHandle(mine, lead, settings.trainers, settings.learner_wait_s)
