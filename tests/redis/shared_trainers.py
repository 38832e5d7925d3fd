"""A leader and members of one run, each with a thread and a model of its own, in this process, on a real Redis."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, load_model
from shared.redis.connection.client import connect
from shared.redis.training.shared_runs import SharedRun
from tests.engine.test_trainer_optimize import OPTIONS, groups_of
from tests.waiting import HANG_S
from trainer.learn.batches import SampleGroup
from trainer.learn.compute import ThreadHost, at_once
from trainer.learn.gate import GateLimits
from trainer.learn.options import AdapterShape, Schedule
from trainer.learners.handle import Handle, HostHandle
from trainer.learners.kinds import PolicyOptions, made_with
from trainer.learners.policy import PolicyLearner, Trained
from trainer.learners.shared import SharedHandle
from trainer.learners.shared_exchange import RunLead
from trainer.learners.shared_member import RunMember, run_spec
from trainer.rollouts.sight import Sight, sight_of
from trainer.settings import TrainSettings
from trainer.state import Arrays

MADE = PolicyOptions(
    AdapterShape(rank=4), replace(OPTIONS, schedule=Schedule(peak=1e-5), microbatch_tokens=40), GateLimits(), seed=3
)
PROBES = ((1, 2, 3, 4),)
RUN = "shared"


def settings(**given: Any) -> TrainSettings:
    return TrainSettings(_cli_parse_args=False, **given)  # type: ignore[call-arg]


@dataclass
class Trainers:
    """One leader and its members."""

    redis_url: str
    stack: contextlib.AsyncExitStack
    options: PolicyOptions = MADE
    model: str = "models/tiny"
    sight: Sight | None = None  # of the latest leader, or of who learns alone
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    members: list[RunMember] = field(default_factory=list)

    async def host(self) -> tuple[ThreadHost, LoadedModel]:
        host = await self.stack.enter_async_context(ThreadHost())
        return host, await host.run(at_once(lambda: load_model(EngineConfig(self.model, dtype="float32"))))

    async def run(self) -> SharedRun:
        redis = await self.stack.enter_async_context(contextlib.aclosing(connect(self.redis_url)))
        blocking = await self.stack.enter_async_context(contextlib.aclosing(connect(self.redis_url, blocking=True)))
        return SharedRun(redis, RUN, blocking=blocking)

    async def alone(self) -> HostHandle[PolicyLearner]:
        host, loaded = await self.host()
        sight = self.sight = sight_of(loaded)
        return await HostHandle.open(host, made_with("policy", self.options), loaded.model, sight)

    async def leader(self, trainers: int = 1, **given: Any) -> SharedHandle:
        host, loaded = await self.host()
        lead = await self.stack.enter_async_context(RunLead(await self.run()))
        spec = run_spec(settings(**given), self.options, "tiny", loaded.card.base_sha256)
        sight = self.sight = sight_of(loaded)
        mine: HostHandle[PolicyLearner] = await HostHandle.open(
            host, made_with("policy", self.options), loaded.model, sight
        )
        await lead.begin(spec)
        return SharedHandle(mine, lead, trainers, HANG_S)

    async def member(self, base: str = "", **given: Any) -> RunMember:
        host, loaded = await self.host()
        if base:
            loaded = replace(loaded, card=msgspec.structs.replace(loaded.card, base_sha256=base))
        member = RunMember(settings(join_run=RUN, **given), await self.run(), host, loaded)
        self.tasks[member.name] = asyncio.create_task(member.take_part())
        self.stack.push_async_callback(self._end, member)
        self.members.append(member)
        return member

    def run_of(self, member: RunMember) -> SharedRun:
        return member._run

    async def _end(self, member: RunMember) -> None:
        self.tasks[member.name].cancel()
        await asyncio.gather(self.tasks[member.name], return_exceptions=True)


@contextlib.asynccontextmanager
async def trainers(
    redis_url: str, options: PolicyOptions = MADE, model: str = "models/tiny"
) -> AsyncIterator[Trainers]:
    async with contextlib.AsyncExitStack() as stack:
        yield Trainers(redis_url, stack, options, model)


async def made_groups(learner: Any, seed: int) -> list[SampleGroup]:
    """Groups whose sampler is the present policy."""
    mine: HostHandle[PolicyLearner] = learner if isinstance(learner, HostHandle) else learner._mine
    return await mine.host.run(at_once(lambda: groups_of(mine.learner.optimizer.policy, seed)))


async def steps(learner: Handle[PolicyLearner], groups: list[list[SampleGroup]]) -> list[Trained]:
    """Train steps on given groups, all accepted."""
    done = []
    for step, each in enumerate(groups):
        done.append(await learner.call(PolicyLearner.train, each, step, step, PROBES))
        await learner.accept()
    return done


def largest_gap(one: Arrays, other: Arrays) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
