"""Scores for data-set tasks: the ring's rewards, or a function of the user's.

Rewards are those of shared/rewards/kinds.py: functions run in processes of their own here, so that a completion that
makes one hang or crash costs its own sample, not the run; a judge and a likelihood are asked of the ring's workers.
A function named `package.module:function` is called as `function(completion, reference, **options)` in a process of its
own (trainer/rollouts/own/own_code.py), may be async, and gives a number or a number with named components.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shared.errors import InvalidRequestError, ParallmError, SetupError
from shared.jobs import Message, RewardSpec
from shared.redis.connection.client import connect
from shared.rewards.kinds import CheckedReward, check
from shared.scoring.pool import RewardPool, RewardSample
from shared.scoring.score import Models, SampleScorer
from shared.scoring.served import ServedRewards
from shared.trajectories import Reward
from trainer.rollouts.environments import Scored, Scorer
from trainer.rollouts.own.own_code import OwnFunction


class Judges(Models, Protocol):
    """Client of served models: `shared.scoring.served.ServedRewards`, or `trainer.ring.over_http.HttpJudges`."""

    async def check(self, reward: CheckedReward) -> Any:
        """An error of ours for a reward that asks a model or adapter which cannot be asked."""

    async def outputs(self, name: str, head: str, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Outputs of an acting head for texts of ids, by a version `NAME@k`; for actions, logits up to a constant.

        ServiceUnavailableError, RedisError or OSError when nobody answers; other errors of ours.
        """


@contextlib.asynccontextmanager
async def open_scorer(
    reward: str,
    options: Mapping[str, Any],
    judges: Judges,
    own_code_timeout_s: float = 60.0,
    own_code_processes: int = 1,
) -> AsyncIterator[Scorer]:
    """The scorer that settings name; SetupError when there is no such reward, or when it does not take the options."""
    if ":" in reward:
        async with OwnFunction(reward, options, own_code_timeout_s, own_code_processes) as function:
            yield function
        return
    checked = _checked(reward, options)
    pool = RewardPool()
    try:
        try:
            await pool.check(checked)  # its patterns
        except InvalidRequestError as error:
            raise SetupError(str(error)) from error
        yield RewardScorer(SampleScorer(pool, judges), checked)
    finally:
        pool.close()


@contextlib.asynccontextmanager
async def ring_judges(redis: str) -> AsyncIterator[ServedRewards]:
    """Judges on the ring with this Redis; nothing is connected before one is asked."""
    connection = connect(redis)
    served = ServedRewards(connection, f"reward-{uuid.uuid4().hex}")
    try:
        yield served
    finally:
        await served.close()
        await connection.aclose()


async def check_judges(reward: str, options: Mapping[str, Any], judges: Judges) -> None:
    """SetupError when a model that the reward asks has never been served."""
    if ":" in reward:
        return
    try:
        await judges.check(_checked(reward, options))
    except ParallmError as error:
        raise SetupError(f"reward {reward!r}: {error}; start a worker for it first") from error


def _checked(reward: str, options: Mapping[str, Any]) -> CheckedReward:
    try:
        return check(RewardSpec(reward, dict(options)))
    except InvalidRequestError as error:
        raise SetupError(f"{error}; or a function of your own: package.module:function") from error


@dataclass
class _Waiting:
    sample: RewardSample
    future: "asyncio.Future[Reward]"


class RewardScorer:
    """A reward of the registry. Samples that finish together are scored in one call."""

    def __init__(self, rewards: SampleScorer, reward: CheckedReward) -> None:
        self._rewards, self._reward = rewards, reward
        self._waiting: list[_Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def __call__(self, completion: str, reference: Any, prompt: str | Sequence[Message] = "") -> Scored:
        """The value and its components; ValueError when the reward failed."""
        future: asyncio.Future[Reward] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(RewardSample(completion, reference, prompt), future))
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
            scored = await self._rewards.score(self._reward, [waiting.sample for waiting in batch])
        except BaseException as error:
            for waiting in batch:
                if not waiting.future.done():
                    waiting.future.set_exception(error)
            raise
        for waiting, reward in zip(batch, scored, strict=True):
            if not waiting.future.done():
                waiting.future.set_result(reward)
