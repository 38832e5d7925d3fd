"""A leader and members of one run, each with a thread and a model of its own, in this process, on a real Redis."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from shared.redis.connection.client import connect
from shared.redis.training.shared_runs import SharedRun
from tests.engine.test_trainer_optimize import OPTIONS, groups_of
from tests.waiting import HANG_S
from trainer.gate import GateLimits
from trainer.learn.batches import SampleGroup
from trainer.learn.compute import ThreadHost, at_once
from trainer.learn.learner import Trained
from trainer.learn.options import AdapterShape, Schedule
from trainer.learners.asks import LearnerOptions
from trainer.learners.loop_learner import HostLearner, build_learner
from trainer.settings import TrainSettings
from trainer.shares.exchange import Lead
from trainer.shares.joining import run_spec
from trainer.shares.leader import SharedLearner
from trainer.shares.member import Member
from trainer.state import Arrays
from trainer.vision.sight import Sight, sight_of
from worker.engine.messages import EngineConfig
from worker.engine.model.loader import LoadedModel, load_model

MADE = LearnerOptions(
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
    options: LearnerOptions = MADE
    model: str = "models/tiny"
    sight: Sight | None = None  # of the latest leader, or of who learns alone
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)

    async def host(self) -> tuple[ThreadHost, LoadedModel]:
        host = await self.stack.enter_async_context(ThreadHost())
        return host, await host.run(at_once(lambda: load_model(EngineConfig(self.model, dtype="float32"))))

    async def run(self) -> SharedRun:
        redis = await self.stack.enter_async_context(contextlib.aclosing(connect(self.redis_url)))
        blocking = await self.stack.enter_async_context(contextlib.aclosing(connect(self.redis_url, blocking=True)))
        return SharedRun(redis, RUN, blocking=blocking)

    async def alone(self) -> HostLearner:
        host, loaded = await self.host()
        sight = self.sight = sight_of(loaded)
        return await HostLearner.open(host, lambda: build_learner(loaded.model, self.options, sight))

    async def leader(self, trainers: int = 1, **given: Any) -> SharedLearner:
        host, loaded = await self.host()
        lead = await self.stack.enter_async_context(Lead(await self.run()))
        spec = run_spec(settings(**given), self.options, "tiny", loaded.card.base_sha256)
        sight = self.sight = sight_of(loaded)
        build = lambda: build_learner(loaded.model, self.options, sight)  # noqa: E731
        return await SharedLearner.open_shared(host, build, lead, spec, trainers, HANG_S)

    async def member(self, base: str = "", **given: Any) -> Member:
        host, loaded = await self.host()
        if base:
            loaded = replace(loaded, card=msgspec.structs.replace(loaded.card, base_sha256=base))
        member = Member(settings(join_run=RUN, **given), await self.run(), host, loaded)
        self.tasks[member.name] = asyncio.create_task(member.take_part())
        self.stack.push_async_callback(self._end, member)
        self.members.append(member)
        return member

    def run_of(self, member: Member) -> SharedRun:
        return member._run

    async def _end(self, member: Member) -> None:
        self.tasks[member.name].cancel()
        await asyncio.gather(self.tasks[member.name], return_exceptions=True)


@contextlib.asynccontextmanager
async def trainers(
    redis_url: str, options: LearnerOptions = MADE, model: str = "models/tiny"
) -> AsyncIterator[Trainers]:
    async with contextlib.AsyncExitStack() as stack:
        yield Trainers(redis_url, stack, options, model)


async def made_groups(learner: HostLearner, seed: int) -> list[SampleGroup]:
    """Groups whose sampler is the present policy."""
    return await learner._host.run(at_once(lambda: groups_of(learner._learner.optimizer.policy, seed)))


async def steps(learner: HostLearner, groups: list[list[SampleGroup]]) -> list[Trained]:
    """Train steps on given groups, all accepted."""
    done = []
    for step, each in enumerate(groups):
        done.append(await learner.train(each, step, step, PROBES))
        await learner.accept()
    return done


def largest_gap(one: Arrays, other: Arrays) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
