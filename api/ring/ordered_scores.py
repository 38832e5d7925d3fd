"""Function rewards for the api: a job runner computes them in its pool of processes; no text runs in this process.

A key has few orders with the runners at a time, and the rest of its own wait here, so that no key fills the runners'
hands. An order whose client has left is taken back.
"""

import asyncio
import contextlib
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence

import msgspec
from redis.asyncio import Redis

from shared.errors import InvalidRequestError, ServiceUnavailableError
from shared.jobs import RewardSpec
from shared.redis import keys
from shared.redis.training.orders import Orders
from shared.scoring.pool import RewardSample
from shared.scoring.shares import Share
from shared.trajectories import Reward, ScoreOrder

MAX_WAITING = 256  # orders that may wait
OF_A_KEY = 8  # orders of one key that are placed at a time
_rewards = msgspec.json.Decoder(list[Reward])


class OrderedScores:
    """Orders scores; what `shared.scoring.score.Rewards` asks for functions."""

    def __init__(self, redis: Redis, within_s: float) -> None:
        self._orders = Orders(redis, keys.score_orders(), most_waiting=MAX_WAITING)
        self._within_s = within_s
        self._asking: defaultdict[str, int] = defaultdict(int)
        self._room: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(OF_A_KEY))

    async def score(
        self, spec: RewardSpec, samples: Sequence[RewardSample], share: Share | None = None
    ) -> list[Reward]:
        """One reward a sample; ServiceUnavailableError when no job runner answers in time."""
        key = share.key if share is not None else ""
        texts = tuple((each.completion, each.reference) for each in samples)
        try:
            body = msgspec.json.encode(ScoreOrder(spec.name, spec.options, texts, key))
        except (RecursionError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"a text or a reference cannot be scored: {error}", param="references") from error
        until = asyncio.get_running_loop().time() + self._within_s
        try:
            async with asyncio.timeout_at(until), self._one_of(key):
                found = await self._answered(body, until - asyncio.get_running_loop().time())
        except TimeoutError:
            found = None
        if found is None:
            raise ServiceUnavailableError(f"no job runner has answered within {self._within_s:.0f} s")
        return _rewards.decode(found)

    @contextlib.asynccontextmanager
    async def _one_of(self, key: str) -> AsyncIterator[None]:
        self._asking[key] += 1
        try:
            async with self._room[key]:
                yield
        finally:
            self._asking[key] -= 1
            if not self._asking[key]:
                del self._asking[key], self._room[key]

    async def _answered(self, body: bytes, within_s: float) -> bytes | None:
        order_id = f"score-{uuid.uuid4().hex}"
        entry = await self._orders.place(order_id, body, within_s)
        try:
            return await self._orders.answer(order_id, within_s)
        except asyncio.CancelledError:
            await self._orders.done([entry])
            raise
