"""Settled sequences of live traffic on their way to becoming trajectories.

Whoever settles a sequence that is to be collected (a worker's commit, a cancellation, the reaper) appends its spec and
result to the model's `collected` stream in the same Lua call, so that there is exactly one entry a sequence, whether
its client is still there or not. A job runner reads it, scores it and hands it to the policy's trajectory queue.

Invariants. The stream is bounded in entries and bytes; the oldest go and are counted. An entry leaves the stream after
the trajectory is in its queue; a runner that dies in between leaves it to another one, and the queue ignores what it
has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.errors import ParallmError
from shared.redis import keys
from shared.redis.connection.client import Argument, Script
from shared.redis.connection.faults import code_of
from shared.sequences import SequenceResult, SequenceSpec, decode_result, decode_spec

log = structlog.get_logger()

SCORERS = "scorers"  # the consumer group
INTAKE_ENTRIES = 10_000
INTAKE_BYTES = 128 << 20
TAKE_OVER_MS = 60_000  # what a runner has not finished by then another one takes

_ack = Script("bounded_ack")


def collecting_keys(model: str) -> list[str]:
    """The keys that a settling script needs for `collecting_arguments`."""
    return [keys.collected(model), keys.collected_stats(model)]


def collecting_arguments(spec: SequenceSpec) -> list[Argument]:
    """What a settling script needs to collect the sequence, or not."""
    return ["1" if spec.collect else "", INTAKE_ENTRIES, INTAKE_BYTES, keys.COLLECTED_TTL_S, SCORERS]


@dataclass(frozen=True)
class Settled:
    """An entry of the intake."""

    entry: str
    spec: SequenceSpec
    result: SequenceResult


class TrajectoryIntake:
    """One model's intake, for a runner that empties it."""

    def __init__(self, redis: Redis, model: str) -> None:
        self._redis = redis
        self._stream = keys.collected(model)
        self._stats = keys.collected_stats(model)
        self._looked_at = b"0-0"  # up to here for what has been left: Redis looks at ten times `count` entries a call

    async def read(self, consumer: str, count: int) -> list[Settled]:
        """The next entries that nobody has, or whose runner has not come back to them; does not wait."""
        try:
            self._looked_at, stuck, _ = await self._redis.xautoclaim(
                self._stream, SCORERS, consumer, TAKE_OVER_MS, start_id=self._looked_at, count=count
            )
            fresh = await self._redis.xreadgroup(SCORERS, consumer, {self._stream: ">"}, count=count)
        except ResponseError as error:
            if code_of(error) == "NOGROUP":
                return []  # nothing was ever collected
            raise
        entries = [*stuck, *(entry for _, some in fresh for entry in some)]
        return await self._decoded(entries)

    async def again(self, consumer: str, entries: Sequence[str]) -> list[Settled]:
        """Entries that this runner has read and put off; without those that are gone, or that another one has taken."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for entry in entries:
                pipe.xpending_range(self._stream, SCORERS, min=entry, max=entry, count=1, consumername=consumer)
                pipe.xrange(self._stream, entry, entry)
            try:
                answers = await pipe.execute()
            except ResponseError as error:
                if code_of(error) == "NOGROUP":
                    return []  # Redis has lost them
                raise
        pairs = zip(answers[::2], answers[1::2], strict=True)
        return await self._decoded([each for mine, there in pairs if mine for each in there])

    async def done(self, settled: list[Settled]) -> None:
        """Their trajectories are where they belong."""
        await self._ack([entry.entry for entry in settled])

    async def _decoded(self, entries: list[tuple[bytes, dict[bytes, bytes] | None]]) -> list[Settled]:
        settled: list[Settled] = []
        for entry, fields in entries:
            try:
                fields = fields or {}
                spec, result = decode_spec(fields[b"spec"]), decode_result(fields[b"result"])
                settled.append(Settled(entry.decode(), spec, result))
            except (KeyError, ValueError, ParallmError) as error:
                log.error("collect.unreadable", entry=entry.decode(), error=str(error))
                await self._ack([entry.decode()])
        return settled

    async def _ack(self, entries: list[str]) -> None:
        if entries:
            await _ack(self._redis, [self._stream, self._stats], [SCORERS, *entries])
