"""Bytes of images in Redis: an api writes them once, under their hash, and the sequence's worker reads them.

Invariants. Each tenant has its own: a hash that another tenant knows finds nothing. What a sequence names was written,
or used again, before the sequence was enqueued, and lives longer than any sequence may.
"""

from redis.asyncio import Redis

from shared.errors import QueueFullError, ServiceUnavailableError
from shared.redis import keys
from shared.redis.connection.client import ask
from shared.redis.kept.kept_things import KeptThings, Terms


class ImageStore:
    """Images by tenant and hash; beyond a tenant's bound those used longest ago go."""

    def __init__(self, redis: Redis, terms: Terms) -> None:
        self._redis = redis
        self._things = KeptThings(redis, terms)

    async def put(self, tenant: str, sha256: bytes, data: bytes) -> None:
        """Write an image, or have it live on; QueueFullError for one that is larger than all that a tenant may have."""
        keeper, name = images_of(tenant), sha256.hex()
        if await self._things.put(keeper, name, {"used": 1}, "there"):
            return
        try:
            await self._things.put(keeper, name, {"used": 1, "bytes": data}, "new")
        except QueueFullError as error:
            error.message = "the image is larger than all images of one key may be together (--image-store-mb)"
            raise

    async def get(self, tenant: str, sha256: bytes) -> bytes:
        """Bytes of an image; ServiceUnavailableError when they have expired."""
        data = await ask(self._redis, "HGET", keys.kept(images_of(tenant), sha256.hex()), "bytes")
        if data is None:
            raise ServiceUnavailableError(
                "an image of this request is not in Redis any more: it was lost, or newer ones took its "
                "room (--image-store-mb); send it again"
            )
        return bytes(data)


def images_of(tenant: str) -> str:
    """Keeper of a tenant's images in names of keys, another than that of its responses."""
    return keys.keeper(f"images of {tenant}")
