"""Orders and their answers: a stream of what is asked, a short-lived key for each answer.

For work that one of a few processes does and an HTTP request waits for: the trainer's updates and checkpoints, the job
runner's quick scores. An order is delivered at least once and stays until `done`; whoever takes it recognises its id.
An order that nobody has taken by its deadline is not carried out any more.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from redis.asyncio import Redis

from shared.errors import QueueFullError
from shared.redis import keys
from shared.redis.connection.client import ask_all
from shared.redis.poll import poll
from shared.redis.stream import Stream, StreamEntry

Body = TypeVar("Body")


@dataclass(frozen=True)
class Received(Generic[Body]):
    """An order that its consumer has taken; the body is bytes until the consumer has decoded it."""

    entry: str
    id: str
    body: Body
    deadline_ms: int
    again: bool  # it was delivered before, to us in an earlier life or to a taker that has died

    @property
    def too_late(self) -> bool:
        """True when its deadline has passed before it was begun."""
        return not self.again and time.time_ns() // 1_000_000 > self.deadline_ms


class Orders(Stream[Received[bytes]]):
    """One stream of orders to a trainer."""

    group = "takers"
    unreadable = "order.unreadable"

    def __init__(self, redis: Redis, key: str, *, blocking: Redis | None = None, most_waiting: int = 32) -> None:
        super().__init__(redis, key, blocking=blocking)
        self._most_waiting = most_waiting

    # -- who asks

    async def place(self, order_id: str, body: bytes, within_s: float) -> str:
        """Place an order and return its entry; the answer comes to `answer`. QueueFullError when too many wait
        already.
        """
        waiting = await self.length()
        if waiting >= self._most_waiting:
            raise QueueFullError(
                f"{waiting} orders are waiting and {self._most_waiting} is the limit; try again shortly"
            )
        deadline = time.time_ns() // 1_000_000 + int(1000 * within_s)
        async with self._redis.pipeline(transaction=True) as pipe:
            fields: dict[Any, Any] = {"id": order_id, "d": body, "deadline_ms": deadline}
            pipe.xadd(self._key, fields)
            pipe.expire(self._key, keys.ORDER_TTL_S)
            entry: bytes = (await pipe.execute())[0]
        return entry.decode()

    async def answer(self, order_id: str, within_s: float) -> bytes | None:
        """Wait for the answer; None when there is none in time."""
        raw = await poll(lambda: self._redis.get(keys.answer(order_id)), within_s)
        return None if raw is None else bytes(raw)

    async def withdrawn(self, entries: Sequence[str]) -> set[str]:
        """Those of these orders that were finished or withdrawn."""
        ranges = await ask_all(self._redis, [("XRANGE", self._key, entry, entry) for entry in entries])
        return {entry for entry, there in zip(entries, ranges, strict=True) if not there}

    # -- who does it

    async def reply(self, order_id: str, answer: bytes) -> None:
        """Answer; repeating it replaces the answer."""
        await self._redis.set(keys.answer(order_id), answer, ex=keys.ANSWER_TTL_S)

    async def finish(self, received: Received[Any]) -> None:
        """Acknowledge an order: it will not be delivered again."""
        await self.done([received.entry])

    @staticmethod
    def _decode(entry: StreamEntry) -> Received[bytes]:
        fields = entry.fields
        return Received(entry.id, fields[b"id"].decode(), fields[b"d"], int(fields[b"deadline_ms"]), entry.again)
