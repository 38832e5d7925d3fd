"""The images of claimed sequences: their bytes out of Redis, cut into the tiles that the model sees.

Invariants. No image is decoded in this process (`shared/image_files/`), and tenants take turns at that. Sequences of a
tenant that bring one image at a time wait for one reading of it. What is kept is bounded in bytes, and only saves
reading it again.
"""

import asyncio
from collections import OrderedDict
from weakref import WeakValueDictionary

from redis.asyncio import Redis

from shared.errors import EngineError, InvalidRequestError
from shared.image_files.reader import ImageReader
from shared.images.refs import ImageRef, Picture, VisionSpec
from shared.redis.jobs.images import job_image
from shared.redis.kept.image_store import ImageStore
from shared.redis.kept.kept_things import Terms
from shared.sequences import SequenceSpec

KEPT_BYTES = 128 << 20


class SequencePictures:
    """Reads the pictures of sequences for one worker."""

    def __init__(self, redis: Redis, vision: VisionSpec | None, kept_bytes: int = KEPT_BYTES) -> None:
        self._redis = redis
        self._store = ImageStore(redis, Terms(1, 1))  # it only reads
        self._vision = vision
        self._reader = ImageReader()
        self._limit = kept_bytes
        self._kept: OrderedDict[bytes, Picture] = OrderedDict()
        self._bytes = 0
        self._alike: WeakValueDictionary[tuple[str, bytes], asyncio.Lock] = WeakValueDictionary()

    async def of(self, spec: SequenceSpec) -> tuple[Picture, ...]:
        """The decoded pictures of a sequence; ParallmError if an image has gone or this worker cannot see."""
        if not spec.images:
            return ()
        if self._vision is None:
            raise EngineError("this worker takes no images")
        by_key = {image.key: image for image in spec.images}
        return tuple([await self._picture(spec, image, self._vision) for image in by_key.values()])

    def close(self) -> None:
        """End the processes that read files."""
        self._reader.close()

    async def _picture(self, spec: SequenceSpec, image: ImageRef, vision: VisionSpec) -> Picture:
        async with self._alike.setdefault((spec.tenant, image.key), asyncio.Lock()):
            data = None if image.key in self._kept else await self._bytes_of(spec, image.sha256)
            if data is not None:
                self._keep(await self._read(data, image, vision, spec.tenant))
            self._kept.move_to_end(image.key)
            picture = self._kept[image.key]
            self._shrink()
            return picture

    async def _bytes_of(self, spec: SequenceSpec, sha256: bytes) -> bytes:
        """A job has its images itself; what others send for their own jobs' sequences waits among the tenant's."""
        own = await job_image(self._redis, spec.job, sha256) if spec.job else None
        return await self._store.get(spec.tenant, sha256) if own is None else own

    async def _read(self, data: bytes, image: ImageRef, vision: VisionSpec, tenant: str) -> Picture:
        try:
            width, height, tiles = await self._reader.tiles(data, vision, image.detail, tenant)
        except InvalidRequestError as error:
            raise EngineError(error.message) from error
        return Picture(image.key, tiles, width, height)

    def _keep(self, picture: Picture) -> None:
        if picture.key not in self._kept:  # another tenant's reading of it may have ended meanwhile
            self._kept[picture.key] = picture
            self._bytes += _size(picture)

    def _shrink(self) -> None:
        while self._bytes > self._limit and self._kept:
            self._bytes -= _size(self._kept.popitem(last=False)[1])


def _size(picture: Picture) -> int:
    return sum(map(len, picture.tiles))
