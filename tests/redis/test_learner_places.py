"""Places of a training service with fewer of them than there are learners: nobody's learners shut others' out."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np
import pytest
from redis.asyncio import Redis

from mlx_model.config import EngineConfig
from mlx_model.loader import load_model
from shared.learners import (
    BeginDone,
    BeginRequest,
    Datum,
    LearnerSpec,
    PassDone,
    PassRequest,
    StepDone,
    StepRequest,
    Values,
)
from shared.redis.training.learner_store import LearnerStore
from tests.waiting import wait_until
from trainer.learn.compute import ThreadHost, at_once
from trainer.service.service import LearnerService
from trainer.service.settings import LearnersSettings

PLACES = 2
IDS = np.array([5, 6, 7, 8])
INPUTS = {"target_tokens": Values.of(IDS[1:]), "weights": Values.of(np.ones(3, np.float32))}
PASS = PassRequest((Datum(IDS[:-1].astype("<i4").tobytes(), INPUTS),), "cross_entropy")
AHEAD = 8  # requests that a client has under way


@contextlib.asynccontextmanager
async def serving(redis: Redis) -> AsyncIterator[None]:
    async with ThreadHost() as host:
        loaded = await host.run(at_once(lambda: load_model(EngineConfig("models/tiny"))))
        made = LearnerService(LearnersSettings(max_learners=PLACES), host, loaded, loaded.card, redis, "s")
        running = asyncio.create_task(made.run())
        try:
            yield
        finally:
            made.stop()
            await running


class Client:
    """Of one learner: it always has more to ask, so that the learner is never idle."""

    def __init__(self, redis: Redis, owner: str, number: int) -> None:
        self.store = LearnerStore(redis)
        id = f"{owner}-{number}"
        self.spec = LearnerSpec(id=id, model="tiny", rank=2, scale=8.0, seed=number, adapter=id, owner=owner)
        self.losses: list[float] = []
        self.steps: list[float] = []

    async def begin(self) -> None:
        await self.store.create(self.spec)
        await self.store.place(self.spec, 1, BeginRequest())
        assert await self.store.answer(self.spec.id, 1, 60) == BeginDone()

    async def learn(self) -> None:
        await self.store.create(self.spec)
        asked = 0
        for number in range(1, 10_000):
            while asked < number + AHEAD:
                asked += 1
                await self.store.place(self.spec, asked, StepRequest() if asked % 2 == 0 else PASS)
            match await self.store.answer(self.spec.id, number, 120):
                case PassDone() as done:
                    self.losses.append(done.metrics["loss:sum"])
                case StepDone() as done:
                    self.steps.append(done.metrics["step:max"])
                case other:
                    raise AssertionError(f"request {number}: {other}")


@contextlib.asynccontextmanager
async def learning(clients: list[Client]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(client.learn()) for client in clients]
    try:
        await wait_until(lambda: sum(bool(client.losses) for client in clients) >= min(PLACES, len(clients)))
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [error for error in ended if not isinstance(error, asyncio.CancelledError)] == []


@pytest.mark.parametrize("learners", [2, 6])
async def test_a_tenant_whose_learners_are_never_idle_shuts_no_other_one_out(redis: Redis, learners: int) -> None:
    async with serving(redis), learning([Client(redis, "alice", number) for number in range(learners)]):
        await Client(redis, "bob", 1).begin()
        async with learning([Client(redis, "bob", 2)]):
            pass


async def test_places_go_round_and_nothing_that_was_learned_is_lost(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("TURN_S", 0.2), ("HANDOVERS", 0.0)):
        monkeypatch.setattr(f"trainer.service.service.{name}", seconds)
    clients = [Client(redis, owner, number) for owner in ("alice", "bob", "carol") for number in range(2)]
    async with serving(redis), learning(clients):
        await wait_until(lambda: min(len(client.steps) for client in clients) > 2 * AHEAD)
    for client in clients:
        assert client.steps == [*range(1, len(client.steps) + 1)]
        assert client.losses[-1] < client.losses[0]
