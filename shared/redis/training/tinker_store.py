"""Belongings of a client of Tinker's protocol besides its learners: sessions, samplers, and the results of its samples.

All of it stands under its keeper, a digest of the tenant's or API key's name, so nobody finds what is another's.
"""

import time
from typing import Any, Literal, TypeVar

import msgspec
from redis.asyncio import Redis

from shared.learners import SaveKind
from shared.redis import keys
from shared.redis.connection.client import members
from shared.redis.stored import StoredMessage

T = TypeVar("T", bound=msgspec.Struct)


class TinkerSession(msgspec.Struct, frozen=True):
    """One client's; learners and samplers are named after it."""

    id: str
    metadata: dict[str, str] = {}
    display_name: str = ""
    finished: bool = False


class TinkerSampler(msgspec.Struct, frozen=True):
    """Source of samples: a model, or `adapter` (name@version) over it."""

    id: str
    base_model: str
    adapter: str = ""
    model_path: str = ""


class TinkerSample(msgspec.Struct, frozen=True):
    """A sample request: the api that works on it, and then the result as protobuf, or its error."""

    api: str
    state: Literal["running", "done", "failed"] = "running"
    result: bytes = b""
    error: str = ""
    fault: Literal["user", "server"] = "user"


class TinkerDownload(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that an address stands for, and which bytes it had then."""

    learner: str
    kind: SaveKind
    name: str
    bytes_id: str
    version: int


class TinkerStore:
    """The things of all keepers."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        ttl_s = keys.TINKER_TTL_S
        self._stored: dict[type[msgspec.Struct], tuple[str, StoredMessage[Any]]] = {
            TinkerSession: ("session", StoredMessage(redis, TinkerSession, ttl_s, packed=True, renews=True)),
            TinkerSampler: ("sampler", StoredMessage(redis, TinkerSampler, ttl_s, packed=True, renews=True)),
            TinkerSample: ("sample", StoredMessage(redis, TinkerSample, keys.SAMPLE_TTL_S, packed=True)),
        }
        self._downloads = StoredMessage(redis, TinkerDownload, keys.TINKER_DOWNLOAD_TTL_S, packed=True)

    async def put(self, keeper: str, id: str, thing: msgspec.Struct, *, new: bool = False) -> bool:
        """Write a thing; with `new` only if there is none of this id, which the result states."""
        name, stored = self._stored[type(thing)]
        return await stored.put(keys.tinker_thing(keeper, f"{name}:{id}"), thing, new=new)

    async def find(self, keeper: str, kind: type[T], id: str) -> T | None:
        """A thing; to find it renews its time to live, but for that of a sample."""
        name, stored = self._stored[kind]
        found: T | None = await stored.find(keys.tinker_thing(keeper, f"{name}:{id}"))
        return found

    async def forget(self, keeper: str, kind: type[T], id: str) -> None:
        """Delete a stored object of this kind."""
        name, stored = self._stored[kind]
        await stored.forget(keys.tinker_thing(keeper, f"{name}:{id}"))

    async def put_download(self, digest: str, download: TinkerDownload) -> None:
        """An address, by its digest, stands for a checkpoint from now on."""
        await self._downloads.put(keys.tinker_download(digest), download)

    async def download(self, digest: str) -> TinkerDownload | None:
        """File that a download address stands for; None when it has expired."""
        return await self._downloads.find(keys.tinker_download(digest))

    async def note_run(self, keeper: str, learner: str) -> None:
        """A learner is the keeper's."""
        async with self._redis.pipeline(transaction=True) as pipe:
            name = keys.tinker_runs(keeper)
            pipe.zadd(name, {learner: time.time_ns() // 1_000_000}, nx=True)
            pipe.zremrangebyscore(name, "-inf", int(1000 * (time.time() - 30 * keys.DAY_S)))
            pipe.expire(name, keys.TINKER_TTL_S)
            await pipe.execute()

    async def runs(self, keeper: str) -> list[str]:
        """The keeper's learners, oldest first; some may be gone."""
        return await members(self._redis, keys.tinker_runs(keeper))
