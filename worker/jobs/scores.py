"""Texts that somebody wants scored at once: orders from /v1/rewards/score, answered from the reward pool."""

import asyncio

import msgspec
import structlog
from redis.exceptions import RedisError

from shared.errors import ParallmError
from shared.jobs import RewardSpec
from shared.redis import keys
from shared.redis.faults import reason
from shared.redis.orders import Orders, Received
from shared.scoring.pool import RewardSample
from shared.trajectories import Reward, ScoreOrder
from worker.jobs.context import TickContext

log = structlog.get_logger()

AT_ONCE = 8
LOOK_S = 1.0
TAKE_OVER_MS = 30_000
RETRY_S = 0.5
_order = msgspec.json.Decoder(ScoreOrder)


class Scores:
    """One runner's share of the scoring. Scoring twice is harmless, so an order is answered first and done then."""

    def __init__(self, context: TickContext) -> None:
        self._context = context
        self._orders = Orders(context.redis, keys.score_orders(), blocking=context.blocking)

    async def run(self) -> None:
        """Answer for ever; a Redis that is away is waited for."""
        while True:
            try:
                orders = await self._orders.take(self._context.runner, AT_ONCE)
                orders += await self._orders.take_over(self._context.runner, TAKE_OVER_MS, AT_ONCE)
                if orders:
                    await asyncio.gather(*(self._answer(order) for order in orders))
                else:
                    await self._orders.wait(LOOK_S)
            except (RedisError, OSError) as error:
                log.warning("scores.redis_away", error=reason(error))
                await asyncio.sleep(RETRY_S)
            except Exception:
                log.exception("scores.failed")
                await asyncio.sleep(RETRY_S)

    async def _answer(self, received: Received) -> None:
        if not received.too_late:
            await self._orders.tell(received.id, msgspec.json.encode(await self._scored(received)))
        await self._orders.done(received)

    async def _scored(self, received: Received) -> list[Reward]:
        try:
            order = _order.decode(received.body)
            samples = [RewardSample(text, reference) for text, reference in order.samples]
            return await self._context.rewards.score(RewardSpec(order.name, order.options), samples)
        except (msgspec.DecodeError, ParallmError) as error:  # of an api that is newer than we are
            return [Reward("", None, error=str(error))]
