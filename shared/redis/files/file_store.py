"""Files in Redis: what batches read and write. Any api process may write one and any other read it.

Invariants. A file is described when all of its bytes are written, and not before. Every key has the file's time to
live; bytes whose writer has died are gone after an hour. An id is 192 random bits, and says nothing of the name.
"""

import contextlib
import secrets
import time
from collections.abc import AsyncIterator

import msgspec
from redis.asyncio import Redis

from shared.errors import InvalidRequestError, ServiceUnavailableError, UnknownFileError
from shared.owners import ANYBODY, Asker
from shared.redis import keys
from shared.redis.chunks import Chunks
from shared.redis.connection.client import ask_all

CHUNK_BYTES = 1 << 20
LISTED_AT_ONCE = 256  # files that a list reads from Redis in one call


class StoredFile(msgspec.Struct, frozen=True):
    """A file without its bytes."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int  # Unix seconds
    expires_at: int
    chunks: int
    tenant: str = ""  # who owns it (shared/owners.py)
    mime_type: str = "application/octet-stream"  # as its uploader states it; nothing here trusts it


def new_file_id() -> str:
    """Draw a random id for a new file."""
    return f"file-{secrets.token_hex(24)}"


class FileWriter:
    """Writes one file, chunk by chunk. Writing the same bytes again under the same id changes nothing."""

    def __init__(self, redis: Redis, file_id: str) -> None:
        self._redis = redis
        self._id = file_id
        self._bytes = Chunks(redis, keys.file_bytes(file_id), keys.FILE_UPLOAD_TTL_S)
        self._held = bytearray()
        self._chunks = 0
        self.size = 0

    async def add(self, data: bytes) -> None:
        """Append bytes; whole chunks are written to Redis."""
        self._held += data
        self.size += len(data)
        while len(self._held) >= CHUNK_BYTES:
            await self._flush()

    async def close(
        self,
        filename: str,
        purpose: str,
        ttl_s: int,
        tenant: str = "",
        *,
        listed: bool = True,
        mime_type: str = "application/jsonl",
    ) -> StoredFile:
        """Make the file visible; ServiceUnavailableError when Redis has lost some of it in a crash.

        `listed`: whether lists of files show it; it is found by its id in any case.
        """
        if self._held:
            await self._flush()
        chunks = [("HEXISTS", keys.file_bytes(self._id), number) for number in range(self._chunks)]
        if not all(await ask_all(self._redis, chunks)):
            raise ServiceUnavailableError("Redis had to forget a part of the file: send it again")
        now = int(time.time())
        file = StoredFile(self._id, filename, purpose, self.size, now, now + ttl_s, self._chunks, tenant, mime_type)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.expire(keys.file_bytes(self._id), ttl_s + 60)  # longer than its description
            for names in {keys.files(), keys.files(tenant)} if listed else ():
                pipe.zadd(names, {self._id: time.time()}, nx=True)
                pipe.zremrangebyscore(names, "-inf", now - keys.FILES_TTL_S)
                pipe.expire(names, keys.FILES_TTL_S)
            pipe.set(keys.file(self._id), msgspec.json.encode(file), ex=ttl_s)
            await pipe.execute()
        return file

    async def discard(self) -> None:
        """Delete what was written. If this fails, it expires."""
        with contextlib.suppress(Exception):
            await self._redis.delete(keys.file_bytes(self._id))

    async def _flush(self) -> None:
        chunk = bytes(self._held[:CHUNK_BYTES])
        await self._bytes.put(self._chunks, chunk)
        del self._held[:CHUNK_BYTES]
        self._chunks += 1


class FileStore:
    """Files as a user sees them."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def writer(self, file_id: str = "") -> FileWriter:
        """Open a new file for writing, under a fresh id by default."""
        return FileWriter(self._redis, file_id or new_file_id())

    async def find(self, file_id: str) -> StoredFile:
        """A file's description; UnknownFileError when there is none."""
        raw = await self._redis.get(keys.file(file_id))
        if raw is None:
            raise unknown_file(file_id)
        return msgspec.json.decode(raw, type=StoredFile)

    async def read(self, file: StoredFile) -> AsyncIterator[bytes]:
        """The bytes, a chunk at a time."""
        async for chunk in Chunks(self._redis, keys.file_bytes(file.id)).pieces(file.chunks):
            if chunk is None and await self._redis.exists(keys.file(file.id)):
                raise ServiceUnavailableError(f"bytes of file {file.id} are missing in Redis: upload it again")
            if chunk is None:
                raise UnknownFileError(f"file {file.id!r} was deleted while it was read")
            yield chunk

    async def lines(self, file: StoredFile, max_bytes: int) -> AsyncIterator[tuple[int, bytes]]:
        """(number from 1, line) of lines that are not blank; InvalidRequestError for one longer than `max_bytes`."""
        held, number = b"", 0
        async for chunk in self.read(file):
            *whole, held = (held + chunk).split(b"\n")
            for line in whole:
                number += 1
                if line.strip():
                    yield number, line
            if len(held) > max_bytes:
                raise InvalidRequestError(f"line {number + 1} is longer than {max_bytes} bytes", param="input_file_id")
        if held.strip():
            yield number + 1, held

    async def list(
        self, purpose: str, limit: int, after: str, *, newest_first: bool, asker: Asker = ANYBODY
    ) -> tuple[list[StoredFile], bool]:
        """A page of the asker's files, and whether there are more, from the one after the file `after`."""
        listed, start = keys.files(asker.tenant if asker.limited else ""), 0
        if after:
            rank = await (self._redis.zrevrank if newest_first else self._redis.zrank)(listed, after)
            if rank is None:
                raise unknown_file(after, "after")
            start = int(rank) + 1
        page: dict[str, StoredFile] = {}  # by id: an upload in between moves a file that we have into the next look
        while len(page) <= limit:
            ids = await self._redis.zrange(listed, start, start + LISTED_AT_ONCE - 1, desc=newest_first)
            if not ids:
                break
            start += len(ids)
            raws = await self._redis.mget([keys.file(raw.decode()) for raw in ids])
            files = [msgspec.json.decode(raw, type=StoredFile) for raw in raws if raw is not None]
            page |= {file.id: file for file in files if purpose in ("", file.purpose)}
        return list(page.values())[:limit], len(page) > limit

    async def delete(self, file_id: str) -> None:
        """Delete a file; UnknownFileError when there is none."""
        tenant = (await self.find(file_id)).tenant
        unlisted = [("ZREM", listed, file_id) for listed in {keys.files(), keys.files(tenant)}]
        # Its description goes last: until then the delete may be repeated.
        gone = [("DEL", keys.file_bytes(file_id)), ("DEL", keys.file(file_id))]
        await ask_all(self._redis, [*unlisted, *gone])


def unknown_file(file_id: str, param: str | None = None) -> UnknownFileError:
    """The error for a file that is not there."""
    return UnknownFileError(f"no file {file_id!r}, or its time to live is over", param=param)
