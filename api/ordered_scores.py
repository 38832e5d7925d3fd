"""Function rewards for the api: a job runner computes them in its pool of processes; no text runs in this process."""

import uuid
from collections.abc import Sequence

import msgspec
from redis.asyncio import Redis

from shared.errors import ServiceUnavailableError
from shared.jobs import RewardSpec
from shared.redis import keys
from shared.redis.orders import Orders
from shared.scoring.pool import RewardSample
from shared.trajectories import Reward, ScoreOrder

KEPT = 256  # orders that may wait
_rewards = msgspec.json.Decoder(list[Reward])


class OrderedScores:
    """Orders scores; what `shared.scoring.rewards.Rewards` asks for functions."""

    def __init__(self, redis: Redis, within_s: float) -> None:
        self._orders = Orders(redis, keys.score_orders(), kept=KEPT)
        self._within_s = within_s

    async def score(self, spec: RewardSpec, samples: Sequence[RewardSample]) -> list[Reward]:
        """One reward a sample; ServiceUnavailableError when no job runner answers in time."""
        order_id = f"score-{uuid.uuid4().hex}"
        order = ScoreOrder(spec.name, spec.options, tuple((each.completion, each.reference) for each in samples))
        await self._orders.place(order_id, msgspec.json.encode(order), self._within_s)
        found = await self._orders.answer(order_id, self._within_s)
        if found is None:
            raise ServiceUnavailableError(f"no job runner has answered within {self._within_s:.0f} s")
        return _rewards.decode(found)
