"""Texts to be scored at once: orders from /v1/rewards/score, answered from the reward pool.

Orders are scored in parallel, so that a slow one holds up none; whose texts get the pool's processes is the
pool's to say. An order without a waiting client is left: its client has gone, or its time is over.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable

import msgspec
import structlog
from redis.exceptions import RedisError

from shared.errors import ParallmError
from shared.jobs import RewardSpec
from shared.redis import keys
from shared.redis.connection.faults import reason
from shared.redis.training.orders import Orders, Received
from shared.rewards.kinds import check
from shared.scoring.pool import RewardSample
from shared.scoring.shares import Share
from shared.trajectories import Reward, ScoreOrder
from worker.jobs.context import TickContext

log = structlog.get_logger()

AT_ONCE = 64
LOOK_S = 0.5
TAKE_OVER_MS = 30_000
RETRY_S = 0.5
_order = msgspec.json.Decoder(ScoreOrder)


class Scores:
    """Answers orders, in one runner. Scoring twice is harmless, so an order is answered first and marked done then."""

    def __init__(self, context: TickContext) -> None:
        self._context = context
        self._orders = Orders(context.redis, keys.score_orders(), blocking=context.blocking)
        self._under_way: dict[str, asyncio.Task[None]] = {}  # by entry

    async def run(self) -> None:
        """Answer until cancelled; while Redis is away, wait."""
        try:
            while True:
                try:
                    if not await self._begin():
                        await self._wait()
                    await self._leave()
                except (RedisError, OSError) as error:
                    log.warning("scores.redis_away", error=reason(error))
                    await asyncio.sleep(RETRY_S)
                except Exception:
                    log.exception("scores.failed")
                    await asyncio.sleep(RETRY_S)
        finally:
            await self._end(list(self._under_way))

    async def _begin(self) -> int:
        """Start as many orders as there is room for; returns how many."""
        self._under_way = {entry: task for entry, task in self._under_way.items() if not task.done()}
        room = AT_ONCE - len(self._under_way)
        if not room:
            return 0
        orders = await self._orders.take(self._context.runner, room)
        orders += await self._orders.take_over(self._context.runner, TAKE_OVER_MS, room)
        new = {order.entry: order for order in orders if order.entry not in self._under_way}
        for entry, order in new.items():
            self._under_way[entry] = asyncio.create_task(self._answer(order))
        return len(new)

    async def _wait(self) -> None:
        if len(self._under_way) < AT_ONCE:
            await self._orders.wait(LOOK_S)
        else:
            await asyncio.wait(self._under_way.values(), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)

    async def _leave(self) -> None:
        """Cancel the orders that were withdrawn."""
        await self._end(await self._orders.withdrawn(list(self._under_way)))

    async def _end(self, entries: Iterable[str]) -> None:
        tasks = [self._under_way[entry] for entry in entries if entry in self._under_way]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, received: Received[bytes]) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(received.deadline_ms / 1000 - time.time()):
                    rewards = await self._scored(received)
                await self._orders.reply(received.id, msgspec.json.encode(rewards))
            await self._orders.finish(received)
        except (RedisError, OSError) as error:  # it comes again
            log.warning("scores.redis_away", error=reason(error))
        except Exception:
            log.exception("scores.failed")

    async def _scored(self, received: Received[bytes]) -> list[Reward]:
        try:
            order = _order.decode(received.body)
            samples = [RewardSample(text, reference) for text, reference in order.samples]
            share = Share(order.key, received.id)
            reward = check(RewardSpec(order.name, order.options))
            return await self._context.rewards.score(reward, samples, share=share)
        except (msgspec.DecodeError, RecursionError, ParallmError) as error:  # of an api that is newer than we are
            return [Reward("", None, error=str(error))]
