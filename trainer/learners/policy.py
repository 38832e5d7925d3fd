"""The part of the trainer that lives in the MLX thread: policy, optimizer, and the weights to fall back to.

Everything that goes in or out is plain data, so that the loop (another thread, an event loop) may hold it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_model.sites import Whole
from shared.adapters import GateCheck
from shared.heads import HeadSpec
from shared.trajectories import Trajectory
from trainer.learn import gate
from trainer.learn.batches import SampleGroup
from trainer.learn.compute import Work
from trainer.learn.gate import GateLimits
from trainer.learn.logprobs import cut
from trainer.learn.measures import measure_gaps, measure_parity, measure_probe_kl
from trainer.learn.optimize import Optimizer
from trainer.learn.options import AdapterShape, OptimizeOptions, ValueOptions
from trainer.learn.packing import pack, unpack
from trainer.learn.policy import Policy
from trainer.learn.steps import StepReport
from trainer.learners.calls import exposed, exposed_read
from trainer.rollouts.sight import Sight
from trainer.state import Arrays, GradientMeans, LearnerSnapshot

_NO_MEANS = GradientMeans()
_OLDER = "older-"  # begins the names of earlier weights in a state


@dataclass(frozen=True)
class Trained:
    """A train step's report, the weights after it, and the gate's checks that need the model."""

    report: StepReport
    weights: Arrays
    checks: tuple[GateCheck, ...]


class PolicyLearner:
    """Belongs to the thread that built it."""

    def __init__(
        self,
        model: Any,
        shape: AdapterShape | None,
        options: OptimizeOptions,
        limits: GateLimits,
        *,
        seed: int = 0,
        checkpoint_layers: bool = False,
        remembered: int = 2,
        sight: Sight | None = None,
        whole: Whole | None = None,
    ) -> None:
        """`whole`: what a model was that ranks divide, all of which learn alike then (trainer/learners/ranks.py)."""
        value = None if options.value is None else _head_of(model, options.value)
        self.policy = Policy(
            model, shape, seed=seed, checkpoint_layers=checkpoint_layers, value=value, sight=sight, whole=whole
        )
        self.optimizer = Optimizer(self.policy, options)
        self._limits = limits
        self._remembered = remembered
        self._older: OrderedDict[int, Arrays] = OrderedDict()  # policy step -> weights
        self.accept()
        self._best: Arrays | None = None  # of the best version that was judged
        self._before = self.optimizer.adam.state()
        self.shapes = {name: tuple(value.shape) for name, value in self._good.items()}

    @exposed
    def train(
        self, groups: Sequence[SampleGroup], step: int, policy_step: int, probes: Sequence[tuple[int, ...]]
    ) -> Work[Trained]:
        """One train step and its checks; the result is not good until `accept`."""
        report = yield from self.step(groups, step, policy_step)
        return (yield from self.checked(report, probes))

    @exposed
    def step(self, groups: Sequence[SampleGroup], step: int, policy_step: int) -> Work[StepReport]:
        """One train step without its checks."""
        older = self.begin(policy_step)
        return (yield from self.optimizer.train_step(groups, step, policy_step=policy_step, older=older))

    @exposed
    def put(self, weights: Arrays, means: GradientMeans = _NO_MEANS) -> None:
        """Other weights, and moments, in the midst of a train step; `revert` takes them back, too."""
        self.policy.load(weights)
        if means.first:
            self.optimizer.adam.take_means(means, self.optimizer.options.adam_betas)

    @exposed_read
    def means(self) -> GradientMeans:
        """Bias-corrected means of the gradient and of its square, from the present moments."""
        return self.optimizer.adam.means(self.optimizer.options.adam_betas)

    @exposed
    def go_on_from(self, weights: Arrays) -> None:
        """Other weights, which are good, with the present moments."""
        self.policy.load(weights)
        self.accept()

    def begin(self, policy_step: int) -> dict[int, Arrays]:
        """Store the moments that `revert` restores; returns the weights of earlier policy steps, by their numbers."""
        self._before = self.optimizer.adam.state()
        self._older[policy_step] = self._good
        while len(self._older) > self._remembered:
            self._older.popitem(last=False)
        return self._older

    @exposed
    def checked(self, report: StepReport, probes: Sequence[tuple[int, ...]]) -> Work[Trained]:
        """The end of a train step: the present weights, and what the gate wants to know of them."""
        weights = self.policy.weights()
        if not report.updated and not report.nonfinite_gradients:
            return Trained(report, weights, ())
        origin = self.policy.origin
        anchors = (self._held, origin) if self._best is None else (self._held, origin, self._best)
        kls = yield from measure_probe_kl(self.policy, anchors, probes)
        checks = (
            gate.finite_gradients(report.nonfinite_gradients),
            gate.finite_weights(weights),
            gate.fits(weights, self.shapes),
            gate.at_most("update_norm", report.update_rms, self._limits.max_update_rms),
            gate.at_most("probe_kl", kls[0], self._limits.max_probe_kl),
            gate.at_most("base_kl", kls[1], self._limits.max_base_kl),
            *(gate.at_most("best_kl", kl, self._limits.max_best_kl) for kl in kls[2:]),
        )
        return Trained(report, weights, checks)

    @exposed
    def parity(self, trajectories: Sequence[Trajectory]) -> Work[float]:
        """Mean difference to a worker's log-probabilities."""
        return measure_parity(self.policy, trajectories)

    @exposed
    def gaps(self, samples: Sequence[SampleGroup], weights: Arrays | None) -> Work[list[float]]:
        """Mean difference of each sample's log-probabilities to those of these weights; None is the base."""
        scores, positions = self.optimizer.scores, self.optimizer.options.microbatch_tokens
        return measure_gaps(self.policy, weights, samples, scores, positions)

    @exposed
    def anchor(self, best: Arrays | None) -> None:
        """Set the weights of the best version: later ones must stay near it."""
        self._best = best

    @exposed
    def begin_with(self, weights: Arrays) -> None:
        """The run begins, or began, with these in place of the base; `load` and `restore` set the present ones."""
        self.policy.origin = weights

    @exposed
    def accept(self) -> None:
        """The present weights are the last good ones."""
        self._good = self.policy.weights()
        # They stay on the device, too: each step's checks ask for them, and on CUDA a 4B's take 0.1 s to be loaded.
        self._held = self.policy.arrays()

    @exposed
    def revert(self) -> None:
        """Back to the last good weights and to the moments that made them, as if the train step had not been."""
        self.policy.load(self._held)
        self.optimizer.adam.put_back(self._before)

    @exposed
    def load(self, weights: Arrays) -> None:
        """Restore older weights after a rollback, without momentum: it points to where rewards collapsed."""
        self.policy.load(weights)
        self.accept()
        self.optimizer.adam.reset()

    def digest(self) -> int:
        return self.policy.digest()

    @exposed_read
    def weights(self) -> Arrays:
        """The present weights of the adapter."""
        return self.policy.weights()

    @exposed_read
    def config(self) -> bytes:
        return self.policy.config()

    @exposed_read
    def snapshot(self) -> LearnerSnapshot:
        """All of the state, for a checkpoint."""
        return LearnerSnapshot(self.policy.weights(), self.policy.config(), self.optimizer.adam.moments())

    @exposed
    def restore(self, snapshot: LearnerSnapshot) -> None:
        """Restore a checkpoint's state exactly."""
        self.policy.load(snapshot.adapter)
        self.optimizer.adam.load_moments(snapshot.optimizer)
        self.accept()

    # -- in the training service, where another process may go on with it

    def state(self) -> bytes:
        """All state that the learner needs to continue, also within a train step that is not yet accepted or
        reverted.
        """
        moments = self.optimizer.adam.moments()
        before = {name: np.array(value) for name, value in tree_flatten(self._before)}
        groups = {"weights": self.policy.weights(), "good": self._good, "moments": moments, "before": before}
        if self.policy.origin is not None:
            groups["origin"] = self.policy.origin
        if self._best is not None:
            groups["best"] = self._best
        return pack(groups | {f"{_OLDER}{step}": weights for step, weights in self._older.items()})

    def resume(self, state: bytes) -> None:
        """Restore exactly the `state`; ValueError when it is another learner's."""
        groups = unpack(state, "weights", "good", "moments", "before")
        self.policy.load(groups["weights"])
        self.optimizer.adam.load_moments(groups["moments"])
        self._good, self._best = groups["good"], groups.get("best")
        self._held = {name: mx.array(value) for name, value in self._good.items()}
        self._before = self.optimizer.adam.as_state(groups["before"])
        self.policy.origin = groups.get("origin")
        older = {int(name.removeprefix(_OLDER)): weights for name, weights in groups.items() if name.startswith(_OLDER)}
        self._older = OrderedDict(sorted(older.items()))


def _head_of(model: Any, options: ValueOptions) -> HeadSpec:
    """The value head for such a model; ValueError when nothing can be read of it, or for a head that is too large."""
    halves = cut(model)
    if halves is None:
        raise ValueError("this model shows no hidden states, so no value head can read them")
    inputs = int(halves.body(mx.zeros((1, 1), mx.int32)).shape[-1])
    return HeadSpec("scalar", activation="gelu" if options.hidden else "", inputs=inputs, hidden=options.hidden)
