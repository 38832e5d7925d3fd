"""The ring's last hour: a sample every few seconds, in one stream of bounded length.

All api processes try to take a sample; a short lease lets one of them do it. Counts are totals since the beginning, so
a reader takes differences, and a missing sample only makes the curve coarser.
"""

import msgspec
from redis.asyncio import Redis

from api.ops.ring_view import RingSample
from shared.redis import keys

SAMPLE_EVERY_S = 5.0
MAX_SAMPLES = 720


class RingHistory:
    """Samples of the last hour in Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def is_my_turn(self, api_id: str) -> bool:
        """True if this api process is to take a sample now. The next turn is in about SAMPLE_EVERY_S."""
        wait_ms = int(900 * SAMPLE_EVERY_S)
        return bool(await self._redis.set(keys.history_turn(), api_id, nx=True, px=wait_ms))

    async def add(self, sample: RingSample) -> None:
        """Keep a sample, and forget those that are too old."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xadd(keys.history(), {"d": msgspec.json.encode(sample)}, maxlen=MAX_SAMPLES, approximate=True)
            pipe.expire(keys.history(), keys.HISTORY_TTL_S)
            await pipe.execute()

    async def newest(self, count: int = MAX_SAMPLES) -> list[RingSample]:
        """The newest samples, in order."""
        entries = await self._redis.xrevrange(keys.history(), count=count)
        return [msgspec.json.decode(fields[b"d"], type=RingSample) for _, fields in reversed(entries)]
