"""Images that requests bring: recognised by their content, decoded once in a process apart, and stored by their hash.

Invariants. What workers are asked to see has been decoded whole by us, and its bytes are in Redis before the sequence
is enqueued. Keys take turns at the processes, and no other key waits for a file that is slow to decode.
"""

import hashlib
from collections import OrderedDict
from typing import NamedTuple

from redis.asyncio import Redis

from api.callers.caller import asker, while_wanted
from api.callers.fair_pool import FairPool, aside
from shared.image_files.pixels import ImageSize
from shared.image_files.reader import ImageReader
from shared.redis.kept.image_store import ImageStore
from shared.redis.kept.kept_things import Terms

PLACES = 2
LARGE_BYTES = 1 << 20  # to hash it takes a millisecond
THUMBNAIL_SIDE = 256  # pixels
KNOWN = 1024  # images whose sizes are remembered


class CheckedImage(NamedTuple):
    """An image that can be seen, and its hash."""

    sha256: bytes
    size: ImageSize


class ImageIntake:
    """Checks and stores the images of all requests to one api process."""

    def __init__(self, redis: Redis, terms: Terms) -> None:
        self._store = ImageStore(redis, terms)
        self._reader = ImageReader(PLACES)
        self._pool = FairPool(PLACES)
        self._known: OrderedDict[bytes, ImageSize] = OrderedDict()

    async def checked(self, data: bytes) -> CheckedImage:
        """Decode an image once; InvalidRequestError says what is wrong with it."""
        digest = (await aside(hashlib.sha256, data) if len(data) > LARGE_BYTES else hashlib.sha256(data)).digest()
        size = self._known.get(digest)
        if size is None:
            size = await while_wanted(self._read(data))
            self._known[digest] = size
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return CheckedImage(digest, size)

    async def keep(self, sha256: bytes, data: bytes) -> None:
        """Keep an image that has been checked, for the tenant's sequences that name it."""
        await self._store.put(asker().tenant, sha256, data)

    async def thumbnail(self, data: bytes) -> bytes:
        """A small PNG of an image, for people."""
        async with self._pool.place():
            return await self._reader.thumbnail(data, THUMBNAIL_SIDE)

    def close(self) -> None:
        """End the decoding processes at shutdown."""
        self._reader.close()

    async def _read(self, data: bytes) -> ImageSize:
        async with self._pool.place():
            return await self._reader.size(data)
