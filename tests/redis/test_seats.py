"""A learner in a service's hands on a bad day: memory runs out, its service dies, the disk is full."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, load_model
from shared.errors import EngineError
from shared.learners import (
    Answer,
    Datum,
    LearnerSpec,
    PassDone,
    PassRequest,
    PublishRequest,
    Request,
    RequestFailed,
    SaveDone,
    StepDone,
    StepRequest,
    Values,
)
from shared.owners import whoever_it_is_for
from shared.redis.adapters.store import AdapterStore
from shared.redis.training.learner_store import LearnerStore
from trainer.learn.compute import ThreadHost, Work, at_once
from trainer.service import seat as seats
from trainer.service.learner import ServiceLearner
from trainer.service.seat import MOST_TRIES, Seat
from trainer.service.turns import Turns

SPEC = LearnerSpec(id="one", model="tiny", rank=4, scale=8.0, seed=3, adapter="one")
IDS = np.array([5, 6, 7, 8])
PASS = PassRequest(
    (
        Datum(
            IDS[:-1].astype("<i4").tobytes(),
            {"target_tokens": Values.of(IDS[1:]), "weights": Values.of(np.ones(3, np.float32))},
        ),
    ),
    "cross_entropy",
)


class Poor(ServiceLearner):
    """One for whose passes there is not the memory."""

    def run(self, request: PassRequest, *_: Any) -> Work[PassDone]:
        raise MemoryError
        yield


class Ring:
    """What seats need; each is a service that dies when it has answered."""

    def __init__(self, redis: Redis, host: ThreadHost, loaded: LoadedModel) -> None:
        self.store, self._host, self._loaded = LearnerStore(redis), host, loaded
        self.adapters = AdapterStore(redis, keep_n=2, who_asks=whoever_it_is_for)
        self.asked = 0

    async def ask(self, *requests: Request) -> None:
        for request in requests:
            self.asked += 1
            await self.store.place(SPEC, self.asked, request)

    async def answers(self, kind: type[ServiceLearner] = ServiceLearner) -> list[Answer]:
        """What comes of all that was asked; nothing is stored but what the requests themselves store."""
        held = await self.store.take("one")
        assert held is not None
        turns, card = Turns(self._host), self._loaded.card
        seat = Seat(held, self.store, self.adapters, turns, card, state_every=99, state_after_s=99, max_saves=2)
        serving = asyncio.ensure_future(seat.run(self._build(kind)))
        try:
            wanted = [asyncio.ensure_future(self.store.answer("one", n + 1, 60)) for n in range(self.asked)]
            await asyncio.wait([serving, asyncio.gather(*wanted)], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            return [answer for each in wanted if (answer := await each) is not None]
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    def _build(self, kind: type[ServiceLearner]) -> Callable[[], ServiceLearner]:
        return lambda: kind(self._loaded.model, SPEC)


@pytest.fixture
async def ring(redis: Redis) -> AsyncIterator[Ring]:
    async with ThreadHost() as host:
        loaded = await host.run(at_once(lambda: load_model(EngineConfig("models/tiny"))))
        made = Ring(redis, host, loaded)
        await made.store.create(SPEC)
        yield made


def steps(answers: list[Answer]) -> list[float]:
    return [answer.metrics["step:max"] for answer in answers if isinstance(answer, StepDone)]


async def test_what_was_refused_has_no_effect_when_there_is_memory_again(ring: Ring) -> None:
    await ring.ask(PASS, StepRequest())
    assert [type(answer) for answer in await ring.answers(Poor)] == [RequestFailed, RequestFailed]
    await ring.ask(PASS, StepRequest())
    assert steps(await ring.answers()) == [1]


async def test_what_was_answered_is_not_left_out_when_memory_has_run_out(ring: Ring) -> None:
    await ring.ask(PASS, StepRequest())
    before = await ring.answers()
    await ring.ask(PASS, StepRequest())
    with pytest.raises(EngineError, match="cannot be carried out again"):
        await ring.answers(Poor)
    after = await ring.answers()
    assert after[:2] == before and steps(after) == [1, 2]
    losses = [answer.metrics["loss:sum"] for answer in after if isinstance(answer, PassDone)]
    assert losses[1] < losses[0]


async def test_a_request_that_ends_its_services_is_given_up(ring: Ring) -> None:
    await ring.ask(PASS, PASS)
    held = await ring.store.take("one")
    assert held is not None
    for _ in range(MOST_TRIES):  # as many services have begun it and died
        await ring.store.begun(held, 1)
    first, second = await ring.answers()
    assert isinstance(first, RequestFailed) and first.fault == "server" and "has ended the service" in first.message
    assert isinstance(second, PassDone), "which is not the end of its learner"
    await ring.ask(StepRequest())
    assert isinstance((await ring.answers())[2], RequestFailed), "what it was to bring is not left out in silence"


async def test_a_new_version_of_a_name_lets_the_former_one_go(ring: Ring) -> None:
    await ring.ask(*[PublishRequest("latest", ttl_s=3600)] * 5)
    versions = [answer.version for answer in await ring.answers() if isinstance(answer, SaveDone)]
    assert versions == [1, 2, 3, 4, 5]
    assert [info.version for info in await ring.store.saves("one")] == [5]
    kept = await ring.adapters.lasting("one", ())
    assert kept <= {4, 5} and 5 in kept, "the service died just when it had answered"


async def test_a_full_disk_is_the_answer_of_the_request_that_met_it(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def full(**_: object) -> Iterator[str]:
        raise OSError(28, "No space left on device")
        yield

    await ring.ask(PASS, PublishRequest("a"), StepRequest())
    with monkeypatch.context() as patch:
        patch.setattr(seats, "TemporaryDirectory", full)
        answers = await ring.answers()
    assert [type(answer) for answer in answers] == [PassDone, RequestFailed, StepDone]
