"""One process's part of a train step, in the MLX thread: a gradient for each update, by the present weights.

With a value head (`--loss ppo`) the part is looked at before its first update: what its tokens come to is added up over
all parts, and advantages are then those of the whole step.
"""

import time
from dataclasses import dataclass

import numpy as np
from mlx.utils import tree_flatten

from trainer.learn.advantages import ValueSums
from trainer.learn.compute import Work
from trainer.learn.optimize import Optimizer, Prepared, judged, shifted
from trainer.learn.steps import Plan, Sums
from trainer.shares.division import positions
from trainer.state import Arrays


@dataclass(frozen=True)
class Computed:
    """A part of one update's gradient; of the whole step's loss, so that parts add up."""

    gradient: Arrays  # none: no token is in the loss, or it was only looked at
    sums: Sums
    positions: int = 0
    seconds: float = 0.0
    known: ValueSums | None = None  # of a look

    @property
    def finite(self) -> bool:
        """Whether every number is."""
        return (self.known is None or self.known.finite) and all(
            np.isfinite(value).all() for value in self.gradient.values()
        )


class Part:
    """Belongs to the thread of the optimizer's policy.

    `before`: the weights that the step began with, where its first update may be over.
    """

    def __init__(self, optimizer: Optimizer, plan: Plan, policy_step: int, before: Arrays | None = None) -> None:
        self._optimizer, self._plan, self._policy_step, self._before = optimizer, plan, policy_step, before
        self._ahead: list[list[Prepared]] | None = None
        self._shifted = False

    def look(self) -> Work[Computed]:
        """What the values of the tokens come to, before the first update."""
        values = self._optimizer.options.value
        assert values is not None, "who looks has a value head"
        started = time.perf_counter()
        self._ahead = yield from self._look_ahead()
        return Computed({}, Sums(), seconds=time.perf_counter() - started, known=judged(self._ahead, values))

    def gradient(self, update: int, known: ValueSums | None = None) -> Work[Computed]:
        """For this update, by the weights that the policy has now; `known`: of all parts, with a value head."""
        plan, optimizer = self._plan, self._optimizer
        if known is not None and not self._shifted:
            if self._ahead is None:  # a part of somebody who has been lost since
                yield from self.look()
            assert self._ahead is not None and optimizer.options.value is not None
            shifted(self._ahead, optimizer.options.value, known)
            self._shifted = True
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
