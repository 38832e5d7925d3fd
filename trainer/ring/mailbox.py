"""What users ask of a running trainer, and what it answers: orders from /v1/training/update and /training/checkpoint.

Invariants. An order that trains is done (will not come again) when a checkpoint with its effect is on disk, so a killed
trainer carries it out again on the weights that do not know it, and an order that the checkpoint's weights know is not
carried out twice. Orders are read by a task of their own: waiting for one may be cancelled without losing it.
"""

import asyncio
from collections import deque
from collections.abc import Collection

import msgspec
import structlog

from shared.errors import ParallmError
from shared.redis import keys
from shared.redis.connection.background_reader import BackgroundReader
from shared.redis.training.orders import Received
from shared.training import Answer, Order
from trainer.seams import Letter, OrderDesk, refusal

log = structlog.get_logger()

WAIT_S = 1.0
_order = msgspec.json.Decoder(Order)


class RingMailbox(BackgroundReader):
    """The orders of one policy."""

    def __init__(self, orders: OrderDesk) -> None:
        self._orders = orders
        self._letters: deque[Letter] = deque()
        self._arrived = asyncio.Event()
        self._kept: list[Received] = []
        self._known: frozenset[str] = frozenset()
        self._seen: deque[str] = deque(maxlen=256)  # an order that was placed twice is carried out once
        self._ready = asyncio.Event()

    def known(self, orders: Collection[str]) -> None:
        """See `Mailbox`; nothing is read before this is told."""
        self._known = frozenset(orders)
        self._ready.set()

    async def next(self) -> Letter:
        """See `Mailbox`."""
        while not self._letters:
            self._arrived.clear()
            await self._arrived.wait()
        return self._letters.popleft()

    def give_back(self, letter: Letter) -> None:
        """See `Mailbox`."""
        self._letters.appendleft(letter)
        self._arrived.set()

    async def answer(self, letter: Letter, answer: Answer, *, keep: bool = False) -> None:
        """See `Mailbox`."""
        await self._orders.tell(letter.received.id, msgspec.json.encode(answer))
        if keep:
            self._kept.append(letter.received)
        else:
            await self._orders.done(letter.received)

    async def saved(self) -> None:
        """See `Mailbox`."""
        kept, self._kept = self._kept, []
        for received in kept:
            await self._orders.done(received)

    async def _read_round(self) -> None:
        await self._ready.wait()
        found = await self._orders.take(keys.TRAINER)
        for received in found:
            await self._sort(received)
        if not found:
            await self._orders.wait(WAIT_S)

    async def _sort(self, received: Received) -> None:
        if received.id in self._known or received.id in self._seen or received.too_late:
            log.info("order.left_out", order=received.id, too_late=received.too_late)
            await self._orders.done(received)
            return
        try:
            order = _order.decode(received.body)
        except msgspec.DecodeError as error:
            await self._orders.tell(received.id, msgspec.json.encode(refusal(ParallmError(f"unreadable: {error}"))))
            await self._orders.done(received)
            return
        self._seen.append(received.id)
        self._letters.append(Letter(received, order))
        self._arrived.set()
