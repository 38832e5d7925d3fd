"""What a run is made of: a thread that computes, a model to train, a ring, and tasks."""

from dataclasses import dataclass, field
from typing import Any

from trainer.learn.compute import ComputeHost
from trainer.learn.learner import Learner
from trainer.loggers.loggers import Loggers
from trainer.ring.ring import Ring
from trainer.rollouts.conversation import ChatEncoder
from trainer.rollouts.environments import Environment
from trainer.settings import TrainSettings


def new_learner(model: Any, settings: TrainSettings) -> Learner:
    """A learner as the settings say, in the thread that the model belongs to; ValueError when they do not fit it."""
    return Learner(
        model,
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
    model: Any  # an mlx-lm model, which belongs to the host's thread
    ring: Ring
    conversation: ChatEncoder
    environment: Environment
    held_out: Environment | None = None
    loggers: Loggers = field(default_factory=Loggers)
