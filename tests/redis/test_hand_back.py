"""Rows that go back to the queue before their end: whoever takes them goes on behind their last token."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from shared.frames import TokenEvent
from shared.redis.tokens.log import read_tokens
from shared.redis.tokens.writer import FrameWriter
from shared.telemetry.metrics import Tally
from tests.redis.sequences import MODEL, plan, queue, spec, state, tokens
from worker.claims import Returns
from worker.publisher import TokenPublisher
from worker.reports import SequenceCounts
from worker.rows import ClaimedRow, ClaimedRows


class Worker:
    """The part of a worker that gives rows back."""

    def __init__(self, redis: Redis) -> None:
        self.queue, self.rows, self.cancelled = queue(redis), ClaimedRows(), list[str]()
        self.publisher = TokenPublisher(
            FrameWriter(redis, MODEL, "w"), self.rows, "w",
            log_every_tokens=100, verify=self._owned, stale_after_s=60, counts=SequenceCounts(Tally(), MODEL),
        )  # fmt: skip
        self.returns = Returns(self.queue, "w", self.rows, self.publisher, self.cancelled.append)

    async def claim(self) -> ClaimedRow:
        (claim,) = await self.queue.claim("w", plan(1))
        row = ClaimedRow.after(claim, [])
        self.rows.add(row)
        return row

    async def _owned(self) -> None:
        return None


@pytest.fixture
async def worker(redis: Redis) -> AsyncIterator[Worker]:
    made = Worker(redis)
    running = asyncio.create_task(made.publisher.run())
    yield made
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def told(events: list[TokenEvent]) -> int:
    return sum(len(event.tokens) for event in events)


async def test_a_row_goes_back_with_all_its_tokens_in_the_log(redis: Redis, worker: Worker) -> None:
    await worker.queue.enqueue([spec("s")])
    row = await worker.claim()
    worker.publisher.take([tokens("s", 0, 3)])
    await worker.returns.hand_back([row])
    assert told(await read_tokens(redis, MODEL, "s", 0)) == 3
    assert "s" not in worker.rows and worker.cancelled == ["s"] and worker.rows.changed.is_set()
    (again,) = await worker.queue.claim("other", plan(1))
    assert (again.spec.id, again.attempt) == ("s", 2)


async def test_what_the_engine_still_says_of_a_row_on_its_way_back_is_dropped(redis: Redis, worker: Worker) -> None:
    await worker.queue.enqueue([spec("s")])
    row = await worker.claim()
    row.occupies_row = False  # the engine was told to end it, to make room
    worker.publisher.take([tokens("s", 0, 3)])
    await worker.returns.hand_back([row])
    await worker.publisher.drained()
    assert await read_tokens(redis, MODEL, "s", 0) == []
    assert await state(redis, "s") == "queued"


async def test_a_newer_attempt_claimed_meanwhile_stays(redis: Redis, worker: Worker) -> None:
    await worker.queue.enqueue([spec("s")])
    first = await worker.claim()
    await worker.queue.release("w", [first.claim])
    second = await worker.claim()
    await worker.returns.hand_back([first])
    assert worker.rows.get("s") is second and worker.cancelled == []
    assert await state(redis, "s") == "running"
