"""Orders of users to a running trainer, from /v1/training/update and /training/checkpoint, and its answers.

Invariants. An order that trains is done (will not come again) when a checkpoint with its effect is on disk, so a killed
trainer carries it out again on the weights that do not know it, and an order that the checkpoint's weights know is not
carried out twice. Orders are read by a task of their own: waiting for one may be cancelled without losing it.
"""

import asyncio
from collections import deque
from collections.abc import Collection
from typing import Any, Protocol

import msgspec
import structlog

from shared.errors import ParallmError
from shared.redis import keys
from shared.redis.connection.background_reader import BackgroundReader
from shared.redis.training.orders import Received
from shared.training import Answer, Order, Refusal

log = structlog.get_logger()

WAIT_S = 1.0
_order = msgspec.json.Decoder(Order)


class OrderDesk(Protocol):
    """Storage of orders: Redis (shared/redis/training/orders.py), or an api (trainer/ring/over_http.py)."""

    async def take(self, consumer: str, count: int = 1) -> list[Received[bytes]]:
        """The next orders, without waiting: first this consumer's unfinished ones, then new ones."""

    async def wait(self, timeout_s: float) -> None:
        """Until something new may be there."""

    async def reply(self, order_id: str, answer: bytes) -> None:
        """Answer; repeating it replaces the answer."""

    async def finish(self, received: Received[Any]) -> None:
        """Acknowledge an order: it will not be delivered again."""


class RingMailbox(BackgroundReader):
    """The orders of one policy."""

    def __init__(self, orders: OrderDesk) -> None:
        self._orders = orders
        self._waiting: deque[Received[Order]] = deque()
        self._arrived = asyncio.Event()
        self._kept: list[Received[Order]] = []
        self._known: frozenset[str] = frozenset()
        self._seen: deque[str] = deque(maxlen=256)  # an order that was placed twice is carried out once
        self._ready = asyncio.Event()

    def known(self, orders: Collection[str]) -> None:
        """Set the orders whose effect the weights already have; must be called before anything is read."""
        self._known = frozenset(orders)
        self._ready.set()

    async def next(self) -> Received[Order]:
        """Wait for an order; may be cancelled without loss."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()

    def give_back(self, received: Received[Order]) -> None:
        """Put an order back, so that it is the next to be received."""
        self._waiting.appendleft(received)
        self._arrived.set()

    async def answer(self, received: Received[Order], answer: Answer, *, keep: bool = False) -> None:
        """Send the answer; with `keep` the order is done only when a checkpoint has its effect."""
        await self._orders.reply(received.id, msgspec.json.encode(answer))
        if keep:
            self._kept.append(received)
        else:
            await self._orders.finish(received)

    async def saved(self) -> None:
        """Mark orders as done whose effect is in the checkpoint that was just written."""
        kept, self._kept = self._kept, []
        for received in kept:
            await self._orders.finish(received)

    async def _read_round(self) -> None:
        await self._ready.wait()
        orders = await self._orders.take(keys.TRAINER)
        for received in orders:
            await self._sort(received)
        if not orders:
            await self._orders.wait(WAIT_S)

    async def _sort(self, received: Received[bytes]) -> None:
        if received.id in self._known or received.id in self._seen or received.too_late:
            log.info("order.left_out", order=received.id, too_late=received.too_late)
            await self._orders.finish(received)
            return
        try:
            order: Order = _order.decode(received.body)
        except msgspec.DecodeError as error:
            await self._orders.reply(received.id, msgspec.json.encode(Refusal.of(ParallmError(f"unreadable: {error}"))))
            await self._orders.finish(received)
            return
        self._seen.append(received.id)
        self._waiting.append(Received(received.entry, received.id, order, received.deadline_ms, received.again))
        self._arrived.set()
