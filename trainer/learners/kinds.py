"""The kinds of learners that can be built from plain data, in this process or in another one that has the model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from mlx_model.sites import Whole
from trainer.learn.gate import GateLimits
from trainer.learn.options import AdapterShape, HeadSettings, OptimizeOptions
from trainer.learners.data import DataLearner, DataOptions
from trainer.learners.distilling import DistillLearner
from trainer.learners.head_examples import ActionSpread, Form
from trainer.learners.heads import HeadLearner
from trainer.learners.policy import PolicyLearner
from trainer.learners.tuning import TuneLearner
from trainer.learners.tuning_examples import Tuning
from trainer.rollouts.sight import Sight

Kind = Literal["policy", "tune", "distill", "head"]
AnyLearner = PolicyLearner | DataLearner[Any]


class Made(msgspec.Struct, frozen=True, tag=True):
    """Recipe of a learner: its kind, and the kind's options as msgpack."""

    kind: Kind
    options: bytes


@dataclass(frozen=True)
class PolicyOptions:
    """A policy's: it learns from groups of scored samples."""

    shape: AdapterShape | None  # None: a head learns alone
    optimize: OptimizeOptions
    limits: GateLimits
    seed: int = 0
    checkpoint_layers: bool = False
    remembered: int = 2  # policy steps whose weights are stored for the distances


@dataclass(frozen=True)
class TuneOptions:
    """Options of a LoRA that learns from answers (sft) or preferences (dpo)."""

    tuning: Tuning
    beta: float  # of dpo
    data: DataOptions


@dataclass(frozen=True)
class HeadOptions:
    """Options of a head, and of the LoRA that learns with it."""

    form: Form
    labels: tuple[str, ...]
    start: float | ActionSpread  # its first outputs
    head: dict[str, Any]  # HeadSettings
    data: DataOptions


def policy_learner(
    model: Any, options: PolicyOptions, sight: Sight | None = None, whole: Whole | None = None
) -> PolicyLearner:
    """A policy's learner; ValueError when the model has no layers for the adapter."""
    return PolicyLearner(
        model, options.shape, options.optimize, options.limits, seed=options.seed,
        checkpoint_layers=options.checkpoint_layers, remembered=options.remembered, sight=sight, whole=whole,
    )  # fmt: skip


def _tune(model: Any, options: TuneOptions, sight: Sight | None, whole: Whole | None) -> TuneLearner:
    return TuneLearner(model, options.tuning, _shape(options.data), options.beta, options.data, sight, whole)


def _distill(model: Any, options: DataOptions, sight: Sight | None, whole: Whole | None) -> DistillLearner:
    return DistillLearner(model, _shape(options), options, whole=whole)


def _head(model: Any, options: HeadOptions, sight: Sight | None, whole: Whole | None) -> HeadLearner:
    head = HeadSettings(**options.head)
    return HeadLearner(model, options.form, options.labels, options.start, head, options.data, whole)


_KINDS: dict[Kind, tuple[type[Any], Callable[..., AnyLearner]]] = {
    "policy": (PolicyOptions, policy_learner),
    "tune": (TuneOptions, _tune),
    "distill": (DataOptions, _distill),
    "head": (HeadOptions, _head),
}


def made_with(kind: Kind, options: Any) -> Made:
    """Encode the recipe of a learner as plain data."""
    return Made(kind, msgspec.msgpack.encode(options))


def made(made_with: Made, model: Any, sight: Sight | None = None, whole: Whole | None = None) -> AnyLearner:
    """Build a learner on a model; ValueError when the options cannot be read, or the model has no layers for it.

    `sight`: what it sees images with; `whole`: what a model was that ranks divide, all of which build one.
    """
    kind, build = _KINDS[made_with.kind]
    try:
        options = msgspec.msgpack.decode(made_with.options, type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"its options cannot be read: {error}") from error
    return build(model, options, sight, whole)


def _shape(options: DataOptions) -> AdapterShape:
    assert options.shape is not None, "a head alone is another kind of run's"
    return options.shape
