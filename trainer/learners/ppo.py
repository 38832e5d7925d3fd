"""Updates of a network by PPO, and the weights to fall back to. Belongs to the MLX thread.

Invariants. Which sequences a minibatch has follows from the seed and the number of the train step. A gradient that is
not finite changes nothing: its update is left out and the report says so.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten

from shared.adapter_files.config import network_config
from shared.networks.spec import VALUE, NetworkSpec
from trainer.learn.adam import AdamSteps, StepSizes
from trainer.learn.compute import Work
from trainer.learn.options import Schedule
from trainer.learn.ppo_losses import PpoOptions, PpoParts, PpoSteps, log_probabilities, ppo
from trainer.learn.ppo_network import outputs_of
from trainer.learners.calls import exposed, exposed_read
from trainer.state import Arrays, LearnerSnapshot

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PpoLearnerOptions:
    """Constants of every train step."""

    loss: PpoOptions
    schedule: Schedule
    epochs: int  # times that each step is learned from
    minibatches: int  # of an epoch
    max_grad_norm: float
    weight_decay: float
    adam_betas: tuple[float, float]
    seed: int


class PpoStepReport(NamedTuple):
    """Figures of a train step; all but the first are means over the updates that were made, or over all if none was."""

    left_out: int  # updates whose gradient was not finite
    loss: float
    policy_loss: float
    value_loss: float
    entropy: float
    clipped: float
    kl: float
    grad_norm: float


class PpoLearner:
    """AdamW over a network's weights."""

    def __init__(self, network: NetworkSpec, weights: Arrays, options: PpoLearnerOptions) -> None:
        self._network, self._options = network, options
        self._weights = _Weights(_tree(weights))
        self._adam = AdamSteps(self._weights, are_constant=True)
        self._gradient = mx.value_and_grad(self._loss)
        self._good = self.snapshot()
        self.shapes = {name: tuple(value.shape) for name, value in weights.items()}

    @exposed
    def train(self, steps: PpoSteps, at: int) -> Work[PpoStepReport]:
        """Learn from steps; `at`: the number of the train step."""
        options, rows = self._options, len(steps.logp_BL)
        betas, decay = options.adam_betas, options.weight_decay
        sizes = StepSizes(options.schedule.rate(at), betas, decay, eps=1e-5, max_grad_norm=options.max_grad_norm)
        draw = np.random.default_rng([options.seed, at])
        told: list[Floats] = []
        made: list[bool] = []
        for _ in range(options.epochs):
            for chosen in np.array_split(draw.permutation(rows), min(rows, options.minibatches)):
                present = self._weights.trainable_parameters()
                parts, gradients = self._gradient(present, steps.taken(chosen).moved())
                figures = np.array(mx.stack([*parts]))
                norm, updated = self._adam.update(gradients, sizes) if np.isfinite(figures[0]) else (np.nan, False)
                told.append(np.array([*figures, norm], np.float32))
                made.append(updated)
                yield
        counted = np.stack(told)[made] if any(made) else np.stack(told)
        return PpoStepReport(len(made) - sum(made), *counted.mean(axis=0).tolist())

    @exposed
    def policy(self, weights: Arrays, steps: PpoSteps) -> tuple[Floats, Floats]:
        """Log-probabilities [B, L] of the actions, and values, by these weights."""
        shape, moved = steps.logp_BL.shape, steps.moved()
        outputs = outputs_of(self._network, _tree(weights), moved.observed_BLI, moved.begins_BL, moved.state)
        logp_R, _ = log_probabilities(outputs, moved.actions.reshape(-1, *moved.actions.shape[2:]))
        return np.array(logp_R).reshape(shape), np.array(outputs[VALUE]).reshape(shape)

    @exposed_read
    def weights(self) -> Arrays:
        """A copy as plain data."""
        return {name: np.array(value) for name, value in tree_flatten(self._weights.trainable_parameters())}

    @exposed_read
    def config(self) -> bytes:
        return network_config(self._network)

    @exposed_read
    def snapshot(self) -> LearnerSnapshot:
        return LearnerSnapshot(self.weights(), self.config(), self._adam.moments())

    @exposed
    def restore(self, snapshot: LearnerSnapshot) -> None:
        self._weights.update(_tree(snapshot.adapter))
        self._adam.load_moments(snapshot.optimizer)
        self._good = snapshot

    @exposed
    def accept(self) -> None:
        """The present weights are the last good ones."""
        self._good = self.snapshot()

    @exposed
    def revert(self) -> None:
        """Back to the last good weights and their moments."""
        self.restore(self._good)

    def _loss(self, weights: dict[str, Any], batch: PpoSteps) -> PpoParts:
        outputs = outputs_of(self._network, weights, batch.observed_BLI, batch.begins_BL, batch.state)
        return ppo(outputs, batch, self._options.loss)


class _Weights(nn.Module):  # type: ignore[misc]
    """A tree of parameters as a module, which AdamSteps updates."""

    def __init__(self, tree: dict[str, Any]) -> None:
        super().__init__()
        for name, value in tree.items():
            self[name] = value


def _tree(weights: Arrays) -> dict[str, Any]:
    tree: dict[str, Any] = tree_unflatten([(name, mx.array(value)) for name, value in weights.items()])
    return tree
