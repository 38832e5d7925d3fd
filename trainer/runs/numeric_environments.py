"""The environments that networks learn in: ours, by name, and the user's own (`--task package.module:Class`).

One of the user's lives in a process of its own (trainer/rollouts/own/own_code.py). What it does wrong ends the run and
is named with its line. Where somebody else has ended that process, its episodes count as cut off, and new ones begin;
so often in a row that nothing is played any more, that ends the run, too.
"""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from shared.errors import ParallmError, SetupError
from trainer.rollouts.cart_pole import CartPole, CopiesStep, Floats
from trainer.rollouts.own.own_code import LostEpisodesError, OwnCodeError, OwnCopies
from trainer.rollouts.own.own_messages import Played, Space
from trainer.settings import TrainSettings

log = structlog.get_logger()

MOST_LOST = 3  # times in a row that episodes are lost before their first step
_OURS = {
    "cart-pole": Space(4, actions=2),
    "cart-pole-force": Space(4, numbers=1),
    "cart-pole-masked": Space(2, actions=2),
}


class NumericEnvironment(Protocol):
    """Copies that are played at once; those whose episode ends begin anew."""

    @property
    def copies(self) -> int:
        """Number of copies that are played."""

    @property
    def observations(self) -> Floats:
        """Present observations, a row for each copy."""

    async def act(self, actions: npt.NDArray[Any]) -> CopiesStep:
        """A step of all of them."""


class Environments:
    """Makes them, of the one kind that a run has."""

    def __init__(self, settings: TrainSettings, space: Space, own: OwnCopies | None = None) -> None:
        self._settings, self.space, self.own = settings, space, own

    async def begin(self, name: str, copies: int, seed: list[int]) -> NumericEnvironment:
        """Start copies with this seed; earlier ones of the same name end."""
        settings = self._settings
        if self.own is not None:
            return await _OwnEnvironment.begin(self.own, name, copies, seed, settings.episode_steps)
        by_force, masked = settings.task == "cart-pole-force", settings.task == "cart-pole-masked"
        return CartPole(copies, seed, by_force=by_force, masked=masked, longest=settings.episode_steps)


def our_space(task: str) -> Space:
    """Space of a built-in environment; SetupError for an unknown name."""
    if task not in _OURS:
        raise SetupError(f"--mode ppo needs --task {', '.join(_OURS)}, or package.module:Class")
    return _OURS[task]


@asynccontextmanager
async def open_environments(settings: TrainSettings) -> AsyncIterator[Environments]:
    """Open the environments that `--task` names; SetupError when there are none."""
    if ":" not in settings.task:
        if settings.task_options:
            raise SetupError("--task-options go with an environment of your own: --task package.module:Class")
        yield Environments(settings, our_space(settings.task))
        return
    async with OwnCopies(settings.task, settings.task_options, settings.own_code_timeout_s) as own:
        first = await _OwnEnvironment.begin(own, "first", 1, [settings.seed], settings.episode_steps)
        yield Environments(settings, first.space, own)


class _OwnEnvironment:
    def __init__(self, own: OwnCopies, name: str, seed: list[int], longest: int, played: Played) -> None:
        self._own, self._name, self._seed, self._longest = own, name, seed, longest
        self._lives = itertools.count(1)
        self._lost = 0  # times in a row
        self.space, self._now = played.space, self._rows(played.now, played.space)

    @classmethod
    async def begin(cls, own: OwnCopies, name: str, copies: int, seed: list[int], longest: int) -> "_OwnEnvironment":
        try:
            return cls(own, name, seed, longest, await own.begin(name, copies, seed, longest))
        except OwnCodeError as error:
            raise ParallmError(str(error)) from error

    @property
    def copies(self) -> int:
        return len(self._now)

    @property
    def observations(self) -> Floats:
        return self._now

    async def act(self, actions: npt.NDArray[Any]) -> CopiesStep:
        try:
            played = await self._own.step(self._name, actions.tolist())
        except LostEpisodesError as error:
            return await self._anew(str(error))
        except OwnCodeError as error:
            raise ParallmError(str(error)) from error
        self._lost, self._now = 0, self._rows(played.now, played.space)
        failed, timed_out = np.array(played.failed, bool), np.array(played.timed_out, bool)
        last = self._rows(played.last, played.space)
        return CopiesStep(np.array(played.rewards, np.float32), failed, timed_out, last)

    async def _anew(self, why: str) -> CopiesStep:
        self._lost += 1
        log.warning("train.episodes_lost", reason=why)
        if self._lost >= MOST_LOST:
            raise ParallmError(f"{why}; {self._lost} times in a row, and nothing was played")
        last, copies = self._now, self.copies
        again = await self.begin(self._own, self._name, copies, [*self._seed, next(self._lives)], self._longest)
        self._now = again.observations
        return CopiesStep(np.zeros(copies, np.float32), np.zeros(copies, bool), np.ones(copies, bool), last)

    @staticmethod
    def _rows(data: bytes, space: Space) -> Floats:
        return np.frombuffer(data, np.float32).reshape(-1, space.observes)
