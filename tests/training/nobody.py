"""A run that nobody watches or gives orders to."""

import asyncio
from collections.abc import Callable, Collection

from shared.training import Answer, TrainerState, TrainerStatus, TrainingPoint
from trainer.seams import Letter


class NoBoard:
    """Tells nobody."""

    def begin(self, status: Callable[[TrainerState], TrainerStatus], stop: Callable[[], None]) -> None:
        """Nothing."""

    async def show(self, state: TrainerState, point: TrainingPoint | None = None, problem: str = "") -> None:
        """Nothing."""


class NoMailbox:
    """Nobody asks."""

    async def next(self) -> Letter:
        """Never."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    def give_back(self, letter: Letter) -> None:
        """Nothing."""

    async def answer(self, letter: Letter, answer: Answer, *, keep: bool = False) -> None:
        """Nothing."""

    async def saved(self) -> None:
        """Nothing."""

    def known(self, orders: Collection[str]) -> None:
        """Nothing."""
