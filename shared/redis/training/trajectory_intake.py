"""Settled sequences of live traffic on their way to becoming trajectories.

Whoever settles a sequence that is to be collected (a worker's commit, a cancellation, the reaper) appends its spec and
result to the model's `collected` stream in the same Lua call, so that there is exactly one entry a sequence, whether
its client is still there or not. A job runner reads it, scores it and hands it to the policy's trajectory queue.

Invariants. The stream is bounded in entries and bytes; the oldest go and are counted. An entry leaves the stream after
the trajectory is in its queue; a runner that dies in between leaves it to another one, and the queue ignores what it
has.
"""

from dataclasses import dataclass

from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import Argument
from shared.redis.stream import Stream, StreamEntry
from shared.sequences import SequenceResult, SequenceSpec, decode_result, decode_spec

INTAKE_ENTRIES = 10_000
INTAKE_BYTES = 128 << 20
TAKE_OVER_MS = 60_000  # what a runner has not finished by then another one takes


def collecting_keys(model: str) -> list[str]:
    """The keys that a settling script needs for `collecting_arguments`."""
    return [keys.collected(model), keys.collected_stats(model)]


def collecting_arguments(spec: SequenceSpec) -> list[Argument]:
    """Arguments of the settling script that say whether, and with which limits, the sequence is collected."""
    return ["1" if spec.collect else "", INTAKE_ENTRIES, INTAKE_BYTES, keys.COLLECTED_TTL_S, TrajectoryIntake.group]


@dataclass(frozen=True)
class Settled:
    """An entry of the intake."""

    entry: str
    spec: SequenceSpec
    result: SequenceResult


class TrajectoryIntake(Stream[Settled]):
    """One model's intake, for a runner that empties it."""

    group = "scorers"
    unreadable = "collect.unreadable"

    def __init__(self, redis: Redis, model: str) -> None:
        super().__init__(redis, keys.collected(model), stats=keys.collected_stats(model))

    async def read(self, consumer: str, count: int) -> list[Settled]:
        """The next entries that no runner has, or whose runner has not come back to them; does not wait."""
        stuck = await self.take_over(consumer, TAKE_OVER_MS, count)
        return stuck + await self.fresh(consumer, count)

    @staticmethod
    def _decode(entry: StreamEntry) -> Settled:
        return Settled(entry.id, decode_spec(entry.fields[b"spec"]), decode_result(entry.fields[b"result"]))
