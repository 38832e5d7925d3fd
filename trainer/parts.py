"""What a run is made of: a thread that computes, a model to train, a ring, and tasks."""

from dataclasses import dataclass, field
from typing import Any

from trainer.learn.compute import ComputeHost
from trainer.learn.learner import Learner
from trainer.learners.asks import LearnerOptions
from trainer.learners.loop_learner import HostLearner, LoopLearner, build_learner
from trainer.loggers.loggers import Loggers
from trainer.ranks.learner import LedLearner
from trainer.ring.ring import Ring
from trainer.rollouts.conversation import ChatEncoder
from trainer.rollouts.environments import Environment
from trainer.rounds.learner import RoundLearner
from trainer.settings import TrainSettings
from trainer.shares.joining import run_spec
from trainer.shares.leader import SharedLearner
from trainer.vision.sight import Sight
from worker.engine.model.sites import Whole


def learner_options(settings: TrainSettings) -> LearnerOptions:
    """What the run's learner is made with."""
    return LearnerOptions(
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
    ring: Ring
    conversation: ChatEncoder
    environment: Environment
    held_out: Environment | None = None
    loggers: Loggers = field(default_factory=Loggers)
    sight: Sight | None = None  # of a model that sees
    whole: Whole | None = None  # where ranks divide the model: what it was before


async def open_learner(parts: Parts, settings: TrainSettings) -> LoopLearner:
    """The run's learner, where the settings want it; ValueError when the model has no layers for its adapter."""
    options = learner_options(settings)
    if parts.ring.learners is not None:
        return await parts.ring.learners.open(options, settings.run_name, settings.folder)

    def build() -> Learner:
        if parts.host.others is not None:
            return LedLearner(parts.host.others, parts.model, options, parts.whole)
        return build_learner(parts.model, options, parts.sight)

    lead, place = parts.ring.lead, parts.ring.federation
    if place is not None:
        return await RoundLearner.open_in(parts.host, build, place, settings.sync_every)
    if lead is None:
        return await HostLearner.open(parts.host, build)
    spec = run_spec(settings, options, parts.ring.model, parts.ring.base_sha256)
    return await SharedLearner.open_shared(parts.host, build, lead, spec, settings.trainers, settings.learner_wait_s)
