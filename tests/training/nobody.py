"""A ring where nobody looks at a run or gives it orders: what the trainer's board and mailbox are written to there."""

import asyncio
from typing import Any

from shared.redis.training.orders import Received
from shared.training import TrainerStatus, TrainingPoint


class NoBoard:
    """Keeps nothing."""

    policy = "policy"

    async def hold(self, owner: str, instead_of: str = "") -> str:
        return owner

    async def let_go(self, owner: str) -> None:
        """Nothing."""

    async def write(self, status: TrainerStatus) -> None:
        """Nothing."""

    async def add(self, point: TrainingPoint) -> None:
        """Nothing."""


class NoOrders:
    """Nobody asks."""

    async def take(self, consumer: str, count: int = 1) -> list[Received[bytes]]:
        return []

    async def wait(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    async def reply(self, order_id: str, answer: bytes) -> None:
        """Nothing."""

    async def finish(self, received: Received[Any]) -> None:
        """Nothing."""
