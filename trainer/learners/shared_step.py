"""One train step that several processes compute, on the leader's side."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import structlog
from mlx.utils import tree_flatten
from redis.exceptions import RedisError

from shared.images.refs import Picture
from shared.redis.connection.faults import reason
from trainer.learn.adam import added
from trainer.learn.advantages import ValueSums
from trainer.learn.compute import ComputeHost, Work, at_once
from trainer.learn.optimize import Optimizer, Prepared, judged, shifted
from trainer.learn.peers import divide
from trainer.learn.steps import StepPlan, Sums
from trainer.learners.policy import PolicyLearner
from trainer.learners.shared_exchange import LEAST_PATIENCE_S, LOOK, PATIENCE, Computed, RunLead, StepPart
from trainer.state import Arrays

log = structlog.get_logger()


class PartComputation:
    """Belongs to the thread of the optimizer's policy.

    `before`: the weights that the step began with, where its first update may be over.
    """

    def __init__(self, optimizer: Optimizer, plan: StepPlan, policy_step: int, before: Arrays | None = None) -> None:
        self._optimizer, self._plan, self._policy_step, self._before = optimizer, plan, policy_step, before
        self._ahead: list[list[Prepared]] | None = None
        self._shifted = False

    def look(self) -> Work[Computed]:
        """Compute the value sums of the whole step before its first update."""
        values = self._optimizer.options.value
        assert values is not None, "who looks has a value head"
        started = time.perf_counter()
        self._ahead = yield from self._look_ahead()
        return Computed({}, Sums(), seconds=time.perf_counter() - started, known=judged(self._ahead, values))

    def gradient(self, update: int, known: ValueSums | None = None) -> Work[Computed]:
        """Compute the part's gradient for this update, by the present weights; `known`: value sums of all parts."""
        plan, optimizer = self._plan, self._optimizer
        if known is not None and not self._shifted:
            if self._ahead is None:  # the part of a member that has been lost since
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


def divided(plan: StepPlan, speeds: Sequence[float]) -> list[StepPlan]:
    """A plan for each process, in the order of their speeds: their samples are those of the whole, each once."""
    minis = [divide(mini, speeds) for mini in plan.minis]
    return [replace(plan, minis=[parts[i] for parts in minis]) for i in range(len(speeds))]


def positions(plan: StepPlan, update: int) -> int:
    """Number of positions in the forward pass of one update."""
    return sum(group.tokens for group in plan.minis[plan.order[update]])


ME = ""  # this process, among the members
_RECENT = 0.5  # weight of the last time in a speed
_AGAIN = 1.05  # by which one that got no sample of a step counts as faster, so that it is measured again at times
_LATE = 0.25  # by which one that was given up though it lives counts as slower: soon it gets nothing to be late with


class SharedStep:
    """A train step from its plan to the last update; the weights are the learner's."""

    def __init__(
        self,
        host: ComputeHost,
        learner: PolicyLearner,
        lead: RunLead,
        plan: StepPlan,
        before: Arrays,
        policy_step: int,
        speeds: dict[str, float],
    ) -> None:
        """`speeds`: positions a second by member, which are used and updated."""
        self._host, self._learner, self._lead = host, learner, lead
        self._plan, self._before, self._policy_step = plan, before, policy_step
        self._speeds = speeds
        self.is_shared = False  # a member had a part
        self._sums = Sums()
        self._plans: dict[str, StepPlan] = {}
        self._parts: dict[str, PartComputation] = {}  # that this process computes
        self._away: set[str] = set()  # members that do not take part any more
        self._late: set[str] = set()  # those of them that live
        self.known: ValueSums | None = None  # of all parts, once they were looked at

    async def take(self, members: Sequence[str]) -> Sums:
        """Every update of the step.

        A member's seconds are those from the update's begin until its gradient is here: who is far away gets less.
        """
        names, speeds = [ME, *members], self._speeds
        plans = divided(self._plan, [speeds.get(name, self._usual(names)) for name in names])
        self._plans = {name: plan for name, plan in zip(names, plans, strict=True) if any(plan.minis)}
        if self._learner.optimizer.options.value is not None:
            looked = await self._computed(LOOK)
            self.known = reduce(ValueSums.plus, (each.known for each in looked.values() if each.known is not None))
        for update in range(len(self._plan.order)):
            computed = await self._computed(update)
            for name, each in computed.items():
                if each.positions and each.seconds and name not in self._away:
                    rate = each.positions / each.seconds
                    speeds[name] = rate + (1 - _RECENT) * (speeds.get(name, rate) - rate)
            await self._host.run(lambda: self._apply([*computed.values()]))  # noqa: B023 - it is awaited
        for name in self._late:
            speeds[name] = _LATE * speeds.get(name, self._usual(names))
        for name in speeds.keys() & set(members) - self._plans.keys():
            speeds[name] *= _AGAIN
        self.is_shared = self._plans.keys() != {ME}
        log.info("shared.step", trainers=len(self._plans), lost=sorted(self._away))
        return self._sums

    def _usual(self, names: Sequence[str]) -> float:
        """The speed of one of which nothing is known: as the others', as far as these are known."""
        known = [self._speeds[name] for name in names if name in self._speeds]
        return sum(known) / len(known) if known else 1.0

    async def _computed(self, update: int) -> dict[str, Computed]:
        """Each part of the update once, in the parts' order."""
        self._lead.expect(float("inf"))  # no member is late before the duration of a part is known
        others = asyncio.create_task(self._others(update))
        try:
            found = {} if ME not in self._plans else {ME: await self._own(ME, update)}
            own_s = found[ME].seconds if found else 0.0
            self._lead.expect(max(LEAST_PATIENCE_S, PATIENCE * max(own_s, self._usual_s(update))))
            found |= await others
        finally:
            others.cancel()
        for name in self._plans:
            if name not in found:
                self._away.add(name)
                found[name] = await self._own(name, update)
            elif name != ME and not found[name].finite:
                found[name] = await self._doubted(name, update, found[name])
        return {name: found[name] for name in self._plans}

    def _usual_s(self, update: int) -> float:
        """Expected duration of the slowest part of an update, as far as speeds are known."""
        updates = range(len(self._plan.order)) if update == LOOK else [update]
        return max(
            (
                sum(positions(plan, each) for each in updates) / self._speeds[name]
                for name, plan in self._plans.items()
                if self._speeds.get(name)
            ),
            default=0.0,
        )

    async def _others(self, update: int) -> dict[str, Computed]:
        began = time.perf_counter()
        wanted = [name for name in self._plans if name != ME and name not in self._away]
        if not wanted:
            return {}
        try:
            if update > 0 or (update == 0 and self.known is not None):
                weights = await self._host.run(at_once(self._learner.weights))
                await self._lead.go(update, weights, self.known)
            else:
                policy, options = self._learner.optimizer.policy, self._learner.optimizer.options
                origin = policy.origin if options.loss.kl_coefficient else None
                parts = {name: StepPart(self._plans[name], self._policy_step) for name in wanted}
                await self._lead.open(self._before, origin, parts, self._pictures(wanted))
            found, late = await self._lead.collect(update, wanted, self._learner.shapes, began)
        except (RedisError, OSError) as error:
            log.warning("shared.redis_away", error=reason(error), lost=wanted)
            return {}
        self._late |= late
        return found

    def _pictures(self, wanted: Sequence[str]) -> list[Picture]:
        """The images that these members' samples show."""
        sight = self._learner.optimizer.policy.sight
        minis = (mini for name in wanted for mini in self._plans[name].minis)
        keys = {image.key for mini in minis for group in mini for image in group.images}
        return [] if sight is None else [sight.picture(key) for key in sorted(keys)]

    async def _own(self, name: str, update: int) -> Computed:
        """Compute a part here: this process's own, or that of a member that is away."""
        if name not in self._parts:
            before = None if update <= 0 else self._before
            self._parts[name] = PartComputation(self._learner.optimizer, self._plans[name], self._policy_step, before)
        part = self._parts[name]
        return await self._host.run(lambda: part.look() if update == LOOK else part.gradient(update, self.known))

    async def _doubted(self, name: str, update: int, theirs: Computed) -> Computed:
        """A member's numbers are not finite: ours, and if those are, the member goes."""
        ours = await self._own(name, update)
        if not ours.finite:
            return theirs
        self._away.add(name)
        try:
            await self._lead.send_off(name, "its gradient is not finite, and another process's is")
        except (RedisError, OSError) as error:
            log.warning("shared.redis_away", error=reason(error))
        return ours

    def _apply(self, computed: Sequence[Computed]) -> Work[None]:
        optimizer, gradient = self._learner.optimizer, None
        for each in computed:
            self._sums.add(each.sums)
            if each.gradient:
                gradient = added(gradient, optimizer.adam.ordered(each.gradient))
        yield from optimizer.apply(gradient, self._plan.rate, self._sums)
