"""A Redis stream that a consumer group reads: each entry is delivered at least once, until it is acknowledged.

Invariants.
- `take` first returns what this consumer had read and not acknowledged in an earlier life, then new entries.
- An entry that was trimmed before it was acknowledged is acknowledged and skipped; one that cannot be decoded is logged
  and removed.
- A group that is missing, though its stream exists, is created at the stream's beginning.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.errors import ParallmError
from shared.redis.connection.client import Script
from shared.redis.connection.faults import code_of

log = structlog.get_logger()

T = TypeVar("T")

_UNREADABLE = (KeyError, ValueError, msgspec.MsgspecError, ParallmError)
_ack = Script("bounded_ack")

_Raw = tuple[bytes, dict[bytes, bytes] | None]


class StreamEntry(NamedTuple):
    """A delivered entry before it is decoded."""

    id: str
    fields: dict[bytes, bytes]
    again: bool  # delivered before: to this consumer in an earlier life, or to one that has died


class Stream(ABC, Generic[T]):
    """One stream of entries of one kind."""

    group: ClassVar[str]  # the consumer group
    unreadable: ClassVar[str]  # event of the log line about an entry that cannot be decoded

    def __init__(self, redis: Redis, key: str, *, stats: str = "", blocking: Redis | None = None) -> None:
        """`stats`: key of the counts of a stream that its scripts bound; `blocking`: the connection of `wait`."""
        self._redis, self._blocking = redis, blocking or redis
        self._key, self._stats = key, stats
        self._resumed_at: str | None = "0-0"  # entries of an earlier life are returned up to here; None: all are
        self._claimed_at: Any = "0-0"  # XAUTOCLAIM looks at ten times `count` entries a call

    @staticmethod
    @abstractmethod
    def _decode(entry: StreamEntry) -> T:
        """KeyError, ValueError or a ParallmError when it cannot be decoded."""

    async def take(self, consumer: str, count: int = 1) -> list[T]:
        """The next entries, without waiting: first those of an earlier life, then new ones."""
        if self._resumed_at is not None:
            entries = await self._read(consumer, self._resumed_at, count)
            if entries:
                self._resumed_at = entries[-1][0].decode()
                return await self._decoded(entries, again=True)
            self._resumed_at = None
        return await self.fresh(consumer, count)

    async def fresh(self, consumer: str, count: int) -> list[T]:
        """Entries that no consumer has read."""
        return await self._decoded(await self._read(consumer, ">", count), again=False)

    async def unfinished(self, consumer: str, after: str, count: int) -> list[T]:
        """Entries after id `after` that this consumer has read and not acknowledged; reads no new ones."""
        return await self._decoded(await self._read(consumer, after, count), again=True)

    async def take_over(self, consumer: str, idle_ms: int, count: int) -> list[T]:
        """Entries that a consumer read at least `idle_ms` ago and has not acknowledged."""
        with _no_group() as found:
            self._claimed_at, entries, _ = await self._redis.xautoclaim(
                self._key, self.group, consumer, idle_ms, start_id=self._claimed_at, count=count
            )
            found.extend(entries)
        return await self._decoded(found, again=True)

    async def still_held(self, consumer: str, ids: Sequence[str]) -> list[T]:
        """Those of these entries that are there and that this consumer still holds."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for id in ids:
                pipe.xpending_range(self._key, self.group, min=id, max=id, count=1, consumername=consumer)
                pipe.xrange(self._key, id, id)
            with _no_group() as found:
                answers = await pipe.execute()
                pairs = zip(answers[::2], answers[1::2], strict=True)
                found.extend(each for mine, there in pairs if mine for each in there)
        return await self._decoded(found, again=True)

    async def peek(self, after: str = "", limit: int = 100) -> list[T]:
        """Entries after id `after`, "" for all, the oldest first; delivers nothing."""
        entries = await self._redis.xrange(self._key, f"({after}" if after else "-", "+", count=limit)
        return [self._decode(StreamEntry(id.decode(), fields, again=False)) for id, fields in entries]

    async def newest(self) -> str:
        """Id of the entry that was added last; "" when the stream is empty."""
        found = await self._redis.xrevrange(self._key, count=1)
        return found[0][0].decode() if found else ""

    async def wait(self, timeout_s: float) -> None:
        """Return when an entry was added, or after `timeout_s`."""
        await self._blocking.xread({self._key: "$"}, count=1, block=max(1, int(1000 * timeout_s)))

    async def length(self) -> int:
        """Entries that are not acknowledged."""
        return int(await self._redis.xlen(self._key))

    async def done(self, ids: Sequence[str]) -> None:
        """Acknowledge and delete entries; repeating it changes nothing."""
        if not ids:
            return
        if self._stats:
            await _ack(self._redis, [self._key, self._stats], [self.group, *ids])
            return
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xack(self._key, self.group, *ids)
            pipe.xdel(self._key, *ids)
            await pipe.execute()

    async def _read(self, consumer: str, after: str, count: int) -> list[_Raw]:
        streams: dict[Any, Any] = {self._key: after}
        try:
            answer = await self._redis.xreadgroup(self.group, consumer, streams, count=count)
        except ResponseError as error:
            if code_of(error) != "NOGROUP":
                raise
            if not await self._redis.exists(self._key):
                return []
            await self._make_group()
            return await self._read(consumer, after, count)
        return [entry for _, entries in answer for entry in entries]

    async def _make_group(self) -> None:
        try:
            await self._redis.xgroup_create(self._key, self.group, id="0")
        except ResponseError as error:
            if code_of(error) != "BUSYGROUP" and await self._redis.exists(self._key):
                raise

    async def _decoded(self, entries: Sequence[_Raw], *, again: bool) -> list[T]:
        decoded: list[T] = []
        for raw, fields in entries:
            id = raw.decode()
            if not fields:
                await self.done([id])
                continue
            try:
                decoded.append(self._decode(StreamEntry(id, fields, again)))
            except _UNREADABLE as error:
                log.error(self.unreadable, entry=id, error=str(error))
                await self.done([id])
        return decoded


@contextlib.contextmanager
def _no_group() -> Iterator[list[_Raw]]:
    """A list to fill; a missing group leaves it empty: nothing was added to the stream, or Redis has lost it."""
    found: list[_Raw] = []
    try:
        yield found
    except ResponseError as error:
        if code_of(error) != "NOGROUP":
            raise
