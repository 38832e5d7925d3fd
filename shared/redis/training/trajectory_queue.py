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

import msgspec
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import Script
from shared.redis.stream import Stream, StreamEntry
from shared.trajectories import LiveTrajectory

CONSUMER = "trainer"  # one trainer a policy: the next one takes over what the last one had read
MAX_ENTRIES = 10_000
MAX_BYTES = 256 << 20

_add = Script("trajectory_add")


@dataclass(frozen=True)
class Delivered:
    """A trajectory that the trainer has taken and not yet acknowledged."""

    entry: str
    live: LiveTrajectory


class TrajectoryQueue(Stream[Delivered]):
    """Queue of the trajectories of one policy."""

    group = "trainers"
    unreadable = "trajectory.unreadable"

    def __init__(
        self,
        redis: Redis,
        policy: str,
        *,
        blocking: Redis | None = None,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__(redis, keys.trajectories(policy), stats=keys.trajectory_stats(policy), blocking=blocking)
        self._seen = keys.trajectories_seen(policy)
        self._bounds = [str(max_entries), str(max_bytes), str(keys.COLLECTED_TTL_S)]

    async def add(self, live: LiveTrajectory) -> bool:
        """Add a trajectory; False when it is known."""
        data = msgspec.json.encode(live)
        args: list[str | bytes | int | float] = [self.group, live.id, data, *self._bounds]
        return bool(await _add(self._redis, [self._key, self._stats, self._seen], args))

    @staticmethod
    def _decode(entry: StreamEntry) -> Delivered:
        return Delivered(entry.id, msgspec.json.decode(entry.fields[b"d"], type=LiveTrajectory))


def is_not_after(entry: str, other: str) -> bool:
    """True if `entry` came before `other`, or is it; "" came before all."""
    return order_of(entry) <= order_of(other)


def order_of(entry: str) -> tuple[int, int]:
    """Sort key of entry ids: the order in which they were added."""
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds or 0), int(number or 0)
