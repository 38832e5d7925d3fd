"""A run's learner whose train steps several processes compute: `mlx_parallm_train --learner shared`.

The loop sees a learner as any other. In each step every process that takes part has some of the samples; gradients are
parts of the whole step's (the constants of its loss are), so their sum is the gradient that one process would have.

Invariants.
- The weights are changed here alone, by one AdamW update on the sum: nothing that a member does, or leaves undone,
  lasts. Members get the weights, so that one which joins later is like any other.
- Each part is in the sum exactly once: a member's answer in time, or else what this process computes for it. Parts are
  added in a fixed order, so a member that dies changes no byte of the result on machines that compute alike.
- A gradient that is not finite is computed again here: where that is finite, the member is sent off; else it is the
  data's, and the gate refuses the step as ever.
- Without a member, or without Redis, a step is what one process computes alone.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import structlog

from trainer.learn.batches import SampleGroup
from trainer.learn.compute import Work, at_once
from trainer.learn.measures import Distances
from trainer.learn.steps import StepPlan, StepReport
from trainer.learners.handle import Handle, HostHandle
from trainer.learners.policy import PolicyLearner, Trained
from trainer.learners.shared_exchange import RunLead
from trainer.learners.shared_step import SharedStep
from trainer.state import Arrays

log = structlog.get_logger()


class SharedHandle(Handle[PolicyLearner]):
    """A learner in the thread of the run's host, `mine`, whose train steps others share.

    `trainers`: the first step waits until so many processes take part, for `wait_s` at most.
    """

    def __init__(self, mine: HostHandle[PolicyLearner], lead: RunLead, trainers: int, wait_s: float) -> None:
        self._mine, self._host, self._learner = mine, mine.host, mine.learner
        self.shapes, self.config = mine.shapes, mine.config
        self.lead, self.trainers, self._wait_s = lead, trainers, wait_s
        self.speeds: dict[str, float] = {}  # positions a second

    async def _called(self, method: str, args: tuple[Any, ...]) -> Any:
        return await (
            self._train(*args) if method == PolicyLearner.train.__name__ else self._mine._called(method, args)
        )

    async def _train(
        self, groups: Sequence[SampleGroup], step: int, policy_step: int, probes: Sequence[tuple[int, ...]]
    ) -> Trained:
        members = await self._members()
        if not members:
            return await self._mine.call(PolicyLearner.train, groups, step, policy_step, probes)
        began = time.perf_counter()
        plan, before, distances = await self._host.run(lambda: self._begin(groups, step, policy_step))
        is_shared = False
        if plan.totals.tokens == 0:
            report = StepReport(updated=False)
        else:
            shared = SharedStep(self._host, self._learner, self.lead, plan, before, policy_step, self.speeds)
            sums, known = await shared.take(members), shared.known
            seconds, is_shared = time.perf_counter() - began, shared.is_shared
            report = await self._host.run(
                at_once(lambda: self._learner.optimizer.report(plan, sums, before, seconds, distances, known))
            )
        trained = await self._mine.call(PolicyLearner.checked, report, probes)
        if is_shared:
            self.lead.close(trained.weights)
        return trained

    async def _members(self) -> list[str]:
        until, members = time.monotonic() + self._wait_s, await self.lead.members()
        while len(members) + 1 < self.trainers:
            if time.monotonic() > until:
                log.warning("shared.few", trainers=len(members) + 1, wanted=self.trainers)
                break
            await asyncio.sleep(0.1)
            members = await self.lead.members()
        self.trainers = 1
        return members

    def _begin(
        self, groups: Sequence[SampleGroup], step: int, policy_step: int
    ) -> Work[tuple[StepPlan, Arrays, Distances | None]]:
        learner = self._learner
        older = learner.begin(policy_step)
        plan, before = learner.optimizer.plan(groups, step), learner.weights()
        if plan.totals.tokens == 0:
            return plan, before, None
        return plan, before, (yield from learner.optimizer.distances(plan, step, policy_step, older))
