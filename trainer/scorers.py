"""Scores for data-set tasks: the ring's rewards, in processes of their own, or a function of the user's.

Rewards are those of shared/rewards.py; a completion that makes one hang or crash costs its own sample, not the run.
A function named `package.module:function` is called in this process as `function(completion, reference, **options)`,
may be async, and gives a number or a number with named components.
"""

import asyncio
import contextlib
import inspect
import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shared import rewards
from shared.errors import InvalidRequestError, SetupError
from shared.jobs import RewardSpec
from shared.scoring.pool import RewardPool, RewardSample
from shared.trajectories import Reward
from trainer.environments import Scorer, load_object

Scored = tuple[float, dict[str, float]]


@contextlib.asynccontextmanager
async def open_scorer(reward: str, options: Mapping[str, Any]) -> AsyncIterator[Scorer]:
    """The scorer that settings name; SetupError when there is no such reward, or when it takes no such options."""
    if ":" in reward:
        yield FunctionScorer(load_object(reward, "reward"), options)
        return
    spec = RewardSpec(reward, dict(options))
    try:
        rewards.check(spec)
    except InvalidRequestError as error:
        raise SetupError(f"{error}; or a function of your own: package.module:function") from error
    pool = RewardPool()
    try:
        yield RewardScorer(pool, spec)
    finally:
        pool.close()


@dataclass
class _Waiting:
    sample: RewardSample
    future: "asyncio.Future[Reward]"


class RewardScorer:
    """A reward of the registry. Samples that finish together are scored in one call of the pool."""

    def __init__(self, pool: RewardPool, spec: RewardSpec) -> None:
        self._pool, self._spec = pool, spec
        self._waiting: list[_Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def __call__(self, completion: str, reference: Any) -> Scored:
        """The value and its components; ValueError when the reward failed."""
        future: asyncio.Future[Reward] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(RewardSample(completion, reference), future))
        if len(self._waiting) == 1:
            call = asyncio.create_task(self._score())
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        reward = await future
        if reward.value is None:
            raise ValueError(reward.error)
        return reward.value, dict(reward.components)

    async def _score(self) -> None:
        await asyncio.sleep(0)  # let the siblings ask too
        batch, self._waiting = self._waiting, []
        try:
            scored = await self._pool.score(self._spec, [each.sample for each in batch])
        except BaseException as error:
            for each in batch:
                if not each.future.done():
                    each.future.set_exception(error)
            raise
        for each, reward in zip(batch, scored, strict=True):
            if not each.future.done():
                each.future.set_result(reward)


class FunctionScorer:
    """A function of the user's own."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function, self._options = function, dict(options)

    async def __call__(self, completion: str, reference: Any) -> Scored:
        """What it says; ValueError when that is no finite number."""
        result = self._function(completion, reference, **self._options)
        if inspect.isawaitable(result):
            result = await result
        value, components = result if isinstance(result, tuple) else (result, {})
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"the reward function gave {value!r}, not a finite number")
        return float(value), {str(name): float(part) for name, part in components.items()}
