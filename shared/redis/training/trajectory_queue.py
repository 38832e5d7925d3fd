"""Scored trajectories of one policy: job runners add them, its trainer consumes each exactly once.

Invariants.
- A trajectory is added once, whoever adds it again: its id is kept for an hour after.
- The stream is bounded in entries and bytes, and expires when nothing comes for COLLECTED_TTL_S; the oldest go first
  and are counted.
- The trainer acknowledges an entry when a checkpoint that knows it is on disk. What a killed trainer had read comes
  back first (`read` begins with the consumer's own unacknowledged entries); its checkpoint tells which of them its
  weights have seen already.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.redis import keys
from shared.redis.connection.client import Script
from shared.redis.connection.faults import code_of
from shared.trajectories import LiveTrajectory

log = structlog.get_logger()

TRAINERS = "trainers"  # the consumer group
CONSUMER = "trainer"  # one trainer a policy: the next one takes over what the last one had read
MAX_ENTRIES = 10_000
MAX_BYTES = 256 << 20

_add = Script("trajectory_add")
_ack = Script("bounded_ack")


@dataclass(frozen=True)
class Delivered:
    """A trajectory in the trainer's hands, until it is acknowledged."""

    entry: str
    live: LiveTrajectory


class TrajectoryQueue:
    """One policy's queue."""

    def __init__(
        self,
        redis: Redis,
        policy: str,
        *,
        blocking: Redis | None = None,  # for `wait`
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._redis = redis
        self._blocking = blocking or redis
        self._stream, self._stats = keys.trajectories(policy), keys.trajectory_stats(policy)
        self._seen = keys.trajectories_seen(policy)
        self._bounds = [str(max_entries), str(max_bytes), str(keys.COLLECTED_TTL_S)]
        self._resumed_at = "0-0"  # own entries of an earlier life, up to here
        self._resuming = True

    async def add(self, live: LiveTrajectory) -> bool:
        """Add a trajectory; False when it is known."""
        data = msgspec.json.encode(live)
        args: list[str | bytes | int | float] = [TRAINERS, live.id, data, *self._bounds]
        return bool(await _add(self._redis, [self._stream, self._stats, self._seen], args))

    async def read(self, count: int) -> list[Delivered]:
        """The next trajectories: first what an earlier life of this trainer had read, then new ones; does not wait."""
        if self._resuming:
            entries = await self._group_read(self._resumed_at, count)
            if entries:
                self._resumed_at = entries[-1][0].decode()
                return await self._decoded(entries)
            self._resuming = False
        return await self._decoded(await self._group_read(">", count))

    async def wait(self, timeout_s: float) -> None:
        """Until something new may be there."""
        await self._blocking.xread({self._stream: "$"}, count=1, block=max(1, int(1000 * timeout_s)))

    async def done(self, entries: list[str]) -> None:
        """A checkpoint has these, or they are of no use; said again it changes nothing."""
        if entries:
            await _ack(self._redis, [self._stream, self._stats], [TRAINERS, *entries])

    async def peek(self, after: str = "", limit: int = 100) -> list[Delivered]:
        """Trajectories that wait, oldest first, from behind entry `after`; takes nothing."""
        entries = await self._redis.xrange(self._stream, f"({after}" if after else "-", "+", count=limit)
        return [_delivered(entry, fields) for entry, fields in entries]

    async def newest(self) -> str:
        """The entry that came last; "": none is there."""
        found = await self._redis.xrevrange(self._stream, count=1)
        return found[0][0].decode() if found else ""

    async def _group_read(self, after: str, count: int) -> list[tuple[bytes, dict[bytes, bytes] | None]]:
        streams: dict[Any, Any] = {self._stream: after}
        try:
            answer = await self._redis.xreadgroup(TRAINERS, CONSUMER, streams, count=count)
        except ResponseError as error:
            if code_of(error) == "NOGROUP":
                return []  # nothing was ever collected
            raise
        return [entry for _, entries in answer for entry in entries]

    async def _decoded(self, entries: list[tuple[bytes, dict[bytes, bytes] | None]]) -> list[Delivered]:
        delivered: list[Delivered] = []
        for entry, fields in entries:
            try:
                delivered.append(_delivered(entry, fields or {}))
            except (
                KeyError,
                ValueError,
                msgspec.MsgspecError,
            ) as error:  # or dropped meanwhile
                log.warning("trajectory.unreadable", entry=entry.decode(), error=str(error))
                await self.done([entry.decode()])
        return delivered


def _delivered(entry: bytes, fields: dict[bytes, bytes]) -> Delivered:
    return Delivered(entry.decode(), msgspec.json.decode(fields[b"d"], type=LiveTrajectory))


def is_not_after(entry: str, other: str) -> bool:
    """Whether an entry came before another one, or is it; "" came before all."""
    return _order(entry) <= _order(other)


def _order(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds or 0), int(number or 0)
