"""Images that a job's prompts name: their bytes, once each, in a hash of the job's own.

Invariant. They live as long as the job's inputs do: whatever waits, is taken over or is enqueued again finds them, and
no other request takes their room.
"""

from collections.abc import AsyncIterator

from redis.asyncio import Redis

from shared.errors import InvalidRequestError
from shared.redis import keys
from shared.redis.connection.client import ask, ask_all


class JobImages:
    """Images of one job that is being submitted."""

    def __init__(self, redis: Redis, job_id: str, most_bytes: int, ttl_s: int) -> None:
        """`ttl_s`: of a job that never becomes visible."""
        self._redis = redis
        self._key = keys.job_images(job_id)
        self._most = most_bytes
        self._ttl_s = ttl_s
        self._known: set[bytes] = set()
        self._bytes = 0

    async def keep(self, sha256: bytes, data: bytes) -> None:
        """Write an image; InvalidRequestError when the job's are too large together."""
        if sha256 in self._known:
            return
        if self._bytes + len(data) > self._most:
            raise InvalidRequestError(
                f"the images up to here have more than {self._most} bytes together (--max-upload-bytes)"
            )
        await ask_all(self._redis, [("HSET", self._key, sha256.hex(), data), ("EXPIRE", self._key, self._ttl_s)])
        self._known.add(sha256)
        self._bytes += len(data)


async def job_image(redis: Redis, job_id: str, sha256: bytes) -> bytes | None:
    """The bytes of an image; None when the job has none of this hash."""
    data = await ask(redis, "HGET", keys.job_images(job_id), sha256.hex())
    return None if data is None else bytes(data)


async def images_of(redis: Redis, job_id: str) -> AsyncIterator[tuple[bytes, bytes]]:
    """Hash and bytes of each image, one at a time."""
    for name in await ask(redis, "HKEYS", keys.job_images(job_id)):
        sha256 = bytes.fromhex(name.decode())
        if (data := await job_image(redis, job_id, sha256)) is not None:
            yield sha256, data
