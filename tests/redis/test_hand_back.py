"""Rows that go back to the queue before their end: whoever takes them goes on behind their last token."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future

import pytest
from redis.asyncio import Redis

from shared.frames import Finish, TokenEvent
from shared.redis.tokens.log import read_tokens
from shared.redis.tokens.writer import FrameWriter
from shared.telemetry.metrics import Tally
from tests.redis.sequences import MODEL, plan, queue, spec, state, tokens
from worker.claims import Returns
from worker.engine.orders import Cancel
from worker.publisher import TokenPublisher
from worker.reports import SequenceCounts
from worker.rows import ClaimedRow, ClaimedRows


class Engine:
    """Says something more of each row that it lets go of."""

    def __init__(self, say: Callable[[list[TokenEvent]], None]) -> None:
        self.cancelled, self.gone = list[str](), list[str]()
        self.last_words: dict[str, list[TokenEvent]] = {}
        self.fails = False
        self._say = say

    def send(self, order: Cancel) -> None:
        self.cancelled.append(order.seq)

    def set_aside(self, seq_ids: list[str]) -> Future[None]:
        future: Future[None] = Future()
        for seq in seq_ids:
            self.gone.append(seq)
            self._say(self.last_words.pop(seq, []))
        if self.fails:
            future.set_exception(MemoryError("no memory"))
        else:
            future.set_result(None)
        return future


class Worker:
    """The part of a worker that gives rows back."""

    def __init__(self, redis: Redis) -> None:
        self.queue, self.rows = queue(redis), ClaimedRows()
        self.publisher = TokenPublisher(
            FrameWriter(redis, MODEL, "w"), self.rows, "w",
            log_every_tokens=100, verify=self._owned, stale_after_s=60, counts=SequenceCounts(Tally(), MODEL),
        )  # fmt: skip
        self.engine = Engine(self.publisher.take)
        self.returns = Returns(self.queue, "w", self.rows, self.publisher, self.engine)

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
    worker.engine.last_words["s"] = [tokens("s", 3, 1)]
    await worker.returns.hand_back([row])
    assert told(await read_tokens(redis, MODEL, "s", 0)) == 4, "its KV is kept up to the last one"
    assert "s" not in worker.rows and worker.engine.gone == ["s"] and worker.rows.changed.is_set()
    (again,) = await worker.queue.claim("other", plan(1))
    assert (again.spec.id, again.attempt) == ("s", 2)


async def test_a_row_that_makes_room_leaves_the_engine_first_and_goes_back_with_what_it_has(
    redis: Redis, worker: Worker
) -> None:
    await worker.queue.enqueue([spec("chat")])
    await worker.queue.enqueue([spec("s", kind="batch", job="j")])
    rows = [await worker.claim(), await worker.claim()]
    worker.engine.last_words["s"] = [tokens("s", 0, 3)]
    gone = worker.returns.make_room(1)
    assert (worker.engine.gone, gone) == (["s"], rows[1:])
    await worker.returns.hand_back(gone)
    worker.publisher.take([tokens("s", 3, 1)])  # too late
    await worker.publisher.drained()
    assert told(await read_tokens(redis, MODEL, "s", 0)) == 3
    assert [await state(redis, seq) for seq in ("chat", "s")] == ["running", "queued"]


async def test_a_row_that_ends_meanwhile_does_not_go_back(redis: Redis, worker: Worker) -> None:
    await worker.queue.enqueue([spec("s")])
    row = await worker.claim()
    worker.engine.last_words["s"] = [tokens("s", 0, 8, finish=Finish("length"))]
    await worker.returns.hand_back([row])
    assert await state(redis, "s") == "done" and "s" not in worker.rows


async def test_a_row_whose_kv_cannot_be_kept_goes_back_all_the_same(redis: Redis, worker: Worker) -> None:
    await worker.queue.enqueue([spec("s")])
    row = await worker.claim()
    worker.engine.fails = True
    await worker.returns.hand_back([row])
    assert await state(redis, "s") == "queued" and worker.engine.cancelled == ["s"]


async def test_a_newer_attempt_claimed_meanwhile_stays(redis: Redis, worker: Worker) -> None:
    await worker.queue.enqueue([spec("s")])
    first = await worker.claim()
    await worker.queue.release("w", [first.claim])
    second = await worker.claim()
    await worker.returns.hand_back([first])
    assert worker.rows.get("s") is second and worker.engine.cancelled == worker.engine.gone == []
    assert await state(redis, "s") == "running"
