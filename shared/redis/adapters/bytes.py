"""The bytes of an adapter version: chunks up, chunks down, hashed on the way.

Token frames go through the same server. A chunk is small enough that a frame behind it hardly waits (of 1 MB: 5 ms),
and between two chunks the writer and the reader pause, so that frames get in between and the append-only file keeps
up (tests/bench/adapter_flight.py measures it).

Invariant: a reader never gets the last chunk before the whole has the right hash.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from redis.asyncio import Redis

from shared.adapters import AdapterManifest
from shared.errors import AdapterDamagedError, UnknownAdapterError
from shared.redis import keys

CHUNK_BYTES = 2**17
PAUSE_S = 0.001  # between two chunks, of which the frames keep their share


async def upload(redis: Redis, key: str, path: Path, sha256: str, chunk_size: int = CHUNK_BYTES) -> int:
    """Write a file's chunks under `key`, which lives for ADAPTER_UPLOAD_TTL_S; the number of chunks.

    AdapterDamagedError when the file is not the one with this hash any more.
    """
    digest, count = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := await asyncio.to_thread(_read, file, chunk_size, digest):
            async with redis.pipeline(transaction=False) as pipe:
                pipe.hset(key, mapping={str(count): chunk})
                pipe.expire(key, keys.ADAPTER_UPLOAD_TTL_S)
                await pipe.execute()
            count += 1
            await asyncio.sleep(PAUSE_S)
    if digest.hexdigest() != sha256:
        raise AdapterDamagedError(f"{path.name} changed while it was uploaded")
    return count


async def fetch(redis: Redis, manifest: AdapterManifest) -> AsyncIterator[bytes]:
    """The bytes of a version; AdapterDamagedError instead of the last chunk when they are not what was published."""
    key = keys.adapter_bytes(manifest.name, manifest.version)
    digest, size = hashlib.sha256(), 0
    for number in range(manifest.chunks):
        async with redis.pipeline(transaction=False) as pipe:
            pipe.hget(key, str(number))
            (chunk,) = await pipe.execute()
        if chunk is None and number == 0:
            raise UnknownAdapterError(f"the bytes of adapter {manifest.id} are gone: deleted or expired")
        if chunk is None:
            raise AdapterDamagedError(f"adapter {manifest.id}: chunk {number} of {manifest.chunks} is missing")
        await asyncio.to_thread(digest.update, chunk)
        size += len(chunk)
        if number == manifest.chunks - 1 and (size != manifest.size or digest.hexdigest() != manifest.sha256):
            raise AdapterDamagedError(
                f"adapter {manifest.id}: its {size} bytes have sha256 {digest.hexdigest()}, "
                f"the manifest says {manifest.size} bytes and {manifest.sha256}"
            )
        yield chunk
        await asyncio.sleep(PAUSE_S)


def _read(file: BinaryIO, size: int, digest: "hashlib._Hash") -> bytes:
    chunk = file.read(size)
    digest.update(chunk)
    return chunk
