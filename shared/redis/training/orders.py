"""Orders and their answers: a stream of what is asked, a short-lived key for each answer.

For work that one of a few processes does and an HTTP request waits for: the trainer's updates and checkpoints, the job
runner's quick scores. An order is delivered at least once and stays until `done`; whoever takes it recognises its id.
An order that nobody has taken by its deadline is not carried out any more.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.errors import QueueFullError
from shared.redis import keys
from shared.redis.connection.faults import code_of

TAKERS = "takers"  # the consumer group
_LOOK_S = (0.01, 0.25)  # pauses between looks for an answer, first and longest


Body = TypeVar("Body")


@dataclass(frozen=True)
class Received(Generic[Body]):
    """An order in somebody's hands; its body is bytes until its taker has decoded it."""

    entry: str
    id: str
    body: Body
    deadline_ms: int
    again: bool  # it was delivered before, to us in an earlier life or to somebody who has died

    @property
    def too_late(self) -> bool:
        """Nobody waits for it any more, and nobody has begun it."""
        return not self.again and time.time_ns() // 1_000_000 > self.deadline_ms


class Orders:
    """One stream of orders."""

    def __init__(self, redis: Redis, stream: str, *, blocking: Redis | None = None, kept: int = 32) -> None:
        self._redis = redis
        self._blocking = blocking or redis
        self._stream = stream
        self._kept = kept
        self._resumed_at = "0-0"
        self._resuming = True

    # -- who asks

    async def place(self, order_id: str, body: bytes, within_s: float) -> str:
        """Ask, and get the order's entry; the answer comes to `answer`. QueueFullError when too many wait already."""
        waiting = await self.waiting()
        if waiting >= self._kept:
            raise QueueFullError(f"{waiting} orders are waiting and {self._kept} is the limit; try again shortly")
        deadline = time.time_ns() // 1_000_000 + int(1000 * within_s)
        async with self._redis.pipeline(transaction=True) as pipe:
            fields: dict[Any, Any] = {"id": order_id, "d": body, "deadline_ms": deadline}
            pipe.xadd(self._stream, fields)
            pipe.expire(self._stream, keys.ORDER_TTL_S)
            entry: bytes = (await pipe.execute())[0]
        return entry.decode()

    async def answer(self, order_id: str, within_s: float) -> bytes | None:
        """Wait for the answer; None when there is none in time."""
        until, pause = time.monotonic() + within_s, _LOOK_S[0]
        while True:
            raw = await self._redis.get(keys.answer(order_id))
            if raw is not None or time.monotonic() >= until:
                return None if raw is None else bytes(raw)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LOOK_S[1])

    async def waiting(self) -> int:
        """Orders that are not done."""
        return int(await self._redis.xlen(self._stream))

    # -- who does it

    async def take(self, consumer: str, count: int = 1) -> list[Received[bytes]]:
        """The next orders: first those that this consumer had and did not finish, then new ones; does not wait."""
        if self._resuming:
            orders = await self.unfinished(consumer, self._resumed_at, count)
            if orders:
                self._resumed_at = orders[-1].entry
                return orders
            self._resuming = False
        return await self.fresh(consumer, count)

    async def unfinished(self, consumer: str, after: str, count: int) -> list[Received[bytes]]:
        """Orders behind entry `after` that this consumer took and has not finished; takes nothing."""
        return await self._received(await self._read(consumer, after, count), again=True)

    async def fresh(self, consumer: str, count: int) -> list[Received[bytes]]:
        """Orders that nobody has taken."""
        return await self._received(await self._read(consumer, ">", count), again=False)

    async def take_over(self, consumer: str, idle_ms: int, count: int) -> list[Received[bytes]]:
        """Orders that somebody else took and has not finished for so long."""
        try:
            _, entries, _ = await self._redis.xautoclaim(
                self._stream, TAKERS, consumer, min_idle_time=idle_ms, count=count
            )
        except ResponseError as error:
            if code_of(error) == "NOGROUP":
                return []
            raise
        return await self._received(entries, again=True)

    async def wait(self, timeout_s: float) -> None:
        """Until something new may be there."""
        await self._blocking.xread({self._stream: "$"}, count=1, block=max(1, int(1000 * timeout_s)))

    async def withdrawn(self, entries: Sequence[str]) -> set[str]:
        """Which of these orders nobody waits for any more."""
        if not entries:
            return set()
        async with self._redis.pipeline(transaction=False) as pipe:
            for entry in entries:
                pipe.xrange(self._stream, entry, entry, count=1)
            ranges = await pipe.execute()
        return {entry for entry, there in zip(entries, ranges, strict=True) if not there}

    async def tell(self, order_id: str, answer: bytes) -> None:
        """Answer; said again it replaces the answer."""
        await self._redis.set(keys.answer(order_id), answer, ex=keys.ANSWER_TTL_S)

    async def done(self, received: Received[Any]) -> None:
        """It will not come again."""
        await self.finish(received.entry)

    async def finish(self, entry: str) -> None:
        """The order of this entry will not come again."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xack(self._stream, TAKERS, entry)
            pipe.xdel(self._stream, entry)
            await pipe.execute()

    async def _read(self, consumer: str, after: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        streams: dict[Any, Any] = {self._stream: after}
        try:
            answer = await self._redis.xreadgroup(TAKERS, consumer, streams, count=count)
        except ResponseError as error:
            if code_of(error) != "NOGROUP":
                raise
            if not await self._redis.exists(self._stream):
                return []
            await self._make_group()
            return await self._read(consumer, after, count)
        return [entry for _, entries in answer for entry in entries]

    async def _make_group(self) -> None:
        try:
            await self._redis.xgroup_create(self._stream, TAKERS, id="0")
        except ResponseError as error:
            if code_of(error) != "BUSYGROUP" and await self._redis.exists(self._stream):
                raise

    async def _received(self, entries: list[tuple[bytes, dict[bytes, bytes]]], *, again: bool) -> list[Received[bytes]]:
        received: list[Received[bytes]] = []
        for entry, fields in entries:
            if not fields:  # it had to make room
                await self._redis.xack(self._stream, TAKERS, entry)
                continue
            order = (fields[b"id"].decode(), fields[b"d"], int(fields[b"deadline_ms"]))
            received.append(Received(entry.decode(), *order, again))
        return received
