"""One process's part of a train step, in the MLX thread: a gradient for each update, by the present weights."""

import time
from dataclasses import dataclass

import numpy as np
from mlx.utils import tree_flatten

from trainer.learn.compute import Work
from trainer.learn.optimize import Optimizer, Prepared
from trainer.learn.steps import Plan, Sums
from trainer.shares.division import positions
from trainer.state import Arrays


@dataclass(frozen=True)
class Computed:
    """A part of one update's gradient; of the whole step's loss, so that parts add up."""

    gradient: Arrays  # none: no token is in the loss
    sums: Sums
    positions: int = 0
    seconds: float = 0.0

    @property
    def finite(self) -> bool:
        """Whether every number is."""
        return all(np.isfinite(value).all() for value in self.gradient.values())


class Part:
    """Belongs to the thread of the optimizer's policy.

    `before`: the weights that the step began with, where its first update may be over.
    """

    def __init__(self, optimizer: Optimizer, plan: Plan, policy_step: int, before: Arrays | None = None) -> None:
        self._optimizer, self._plan, self._policy_step, self._before = optimizer, plan, policy_step, before
        self._ahead: list[list[Prepared]] | None = None

    def gradient(self, update: int) -> Work[Computed]:
        """For this update, by the weights that the policy has now."""
        plan, optimizer = self._plan, self._optimizer
        started, at, sums = time.perf_counter(), plan.order[update], Sums()
        # Even without samples now, for the weights change after this.
        if self._ahead is None and optimizer.looks_ahead(plan):
            self._ahead = yield from self._look_ahead()
        if not plan.minis[at]:
            return Computed({}, sums)
        batches = self._ahead[at] if self._ahead else optimizer.each_prepared(plan.minis[at], self._policy_step)
        tree = yield from optimizer.gradient(batches, plan.parts[at], sums)
        gradient = {} if tree is None else {name: np.array(value) for name, value in tree_flatten(tree)}
        return Computed(gradient, sums, positions(plan, update), time.perf_counter() - started)

    def _look_ahead(self) -> Work[list[list[Prepared]]]:
        policy, present, ahead = self._optimizer.policy, None, []
        if self._before is not None:
            present = policy.weights()
            policy.load(self._before)
        try:
            for mini in self._plan.minis:
                prepared = self._optimizer.prepare(mini, self._policy_step, several=self._plan.several)
                ahead.append((yield from prepared) if mini else [])
        finally:
            if present is not None:
                policy.load(present)
        return ahead
