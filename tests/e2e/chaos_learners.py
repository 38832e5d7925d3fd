"""Learners of the training service while processes die: each takes the same lessons, and must learn the same."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import RedisError

from shared.learners import Answer, LearnerSpec
from shared.redis.connection.client import connect
from shared.redis.training.learner_store import LearnerStore
from tests.e2e.chaos_load import Load
from tests.e2e.rings import MODEL
from tests.e2e.served.test_learners import lessons
from tests.waiting import HANG_S

T = TypeVar("T")


class Learners:
    """One learner after another, until the load is told to stop; `expected`: the answers to one that nothing harmed."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._redis = connect(load.ring.redis.url)
        self._store = LearnerStore(self._redis)
        self.expected: list[Answer] = []
        self.learned = 0

    async def begin(self) -> None:
        self.expected = await self._teach("chaos-first") or []
        assert self.expected, "the first learner got no answers"

    async def run(self) -> None:
        try:
            for number in itertools.count():
                if self._load.stopping:
                    return
                answers = await self._teach(f"chaos-{number}")
                if answers is None:
                    return
                wrong = [
                    at for at, pair in enumerate(zip(answers, self.expected, strict=True), 1) if pair[0] != pair[1]
                ]
                if wrong:
                    self._load.report.violation(f"learner {number}: other answers than the first one's to {wrong}")
                self.learned += 1
                await self._patiently(lambda number=number: self._store.drop(MODEL, f"chaos-{number}"))
        finally:
            await self._redis.aclose()

    async def _teach(self, id: str) -> list[Answer] | None:
        """The answers to all lessons; None when the load is to stop first."""
        asked, spec = lessons(), LearnerSpec(id=id, model=MODEL, rank=4, scale=8.0, seed=1, adapter=id)
        await self._patiently(lambda: self._store.create(spec))
        for number, request in enumerate(asked, 1):
            await self._patiently(lambda number=number, request=request: self._store.place(spec, number, request))
        answers: list[Answer] = []
        until = time.monotonic() + HANG_S
        while len(answers) < len(asked):
            if self._load.stopping:
                return None
            answer = await self._patiently(lambda: self._store.answer(id, len(answers) + 1))
            if answer is not None:
                answers.append(answer)
                until = time.monotonic() + HANG_S
            elif time.monotonic() > until:
                self._load.report.violation(f"learner {id}: request {len(answers) + 1} was not answered")
                return None
            else:
                await asyncio.sleep(0.1)
        return answers

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What Redis says in the end; all that is asked may be repeated."""
        until = time.monotonic() + HANG_S
        while True:
            try:
                return await ask()
            except (RedisError, OSError):
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.1)
