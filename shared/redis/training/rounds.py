"""Runs that average their weights from time to time: the last average, and what each has changed since.

Invariants.
- A round is over once: its average takes the place of the one before in one step, and a second one for the same round
  is refused. So a change counts in one average or in none.
- A run's change for a round is one, however often it is told: a run that was killed and tells it again replaces it.
- Times are Redis'.
"""

from dataclasses import dataclass

import msgspec
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import Script, ask, server_time_ms
from shared.redis.training.parcels import Parcels, StoredParcel
from shared.redis.training.presence import Presence

TURN_S = 30
_close = Script("round_close")
_begin = Script("round_begin")


@dataclass(frozen=True)
class ClosedRound:
    """The last round that is over: its average, and whose changes are in it."""

    spec: bytes
    round: int
    state: StoredParcel
    taken: frozenset[str]


class Change(msgspec.Struct, frozen=True, array_like=True):
    """The difference that one run has made to the weights since the last round."""

    delta: StoredParcel
    samples: int  # that it has learned from
    published_ms: int


class RoundStore:
    """Rounds and members of one federation."""

    def __init__(self, redis: Redis, name: str) -> None:
        self._redis, self.name = redis, name
        self.parcels = Parcels(redis, lambda id: keys.round_bytes(name, id))
        self.members = Presence(redis, keys.round_members(name))  # runs; who is dead is not waited for

    async def now(self) -> ClosedRound | None:
        """The last round that is over; None: the federation has not begun."""
        key = keys.rounds(self.name)
        spec, number, state, taken = await ask(self._redis, "HMGET", key, "spec", "round", "state", "taken")
        if spec is None:
            return None
        parcel = msgspec.msgpack.decode(state, type=StoredParcel)
        return ClosedRound(spec, int(number), parcel, frozenset(taken.decode().split("\n")) - {""})

    async def begin(self, spec: bytes, state: StoredParcel) -> bool:
        """Begin the federation; False: another run has begun it."""
        names = [keys.rounds(self.name), keys.round_bytes(self.name, state.id)]
        return bool(await _begin(self._redis, names, [spec, msgspec.msgpack.encode(state), keys.ROUNDS_TTL_S]))

    async def put_change(self, round: int, member: str, delta: StoredParcel, samples: int) -> None:
        """Publish this run's difference for the average of a round."""
        key = keys.round_deltas(self.name, round)
        change = Change(delta, samples, await server_time_ms(self._redis, key))
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(key, mapping={member: msgspec.msgpack.encode(change)})
            pipe.expire(key, keys.ROUNDS_TTL_S)
            await pipe.execute()

    async def changes(self, round: int) -> tuple[dict[str, Change], float]:
        """The changes for a round, by run, and how many seconds ago the first of them came."""
        key = keys.round_deltas(self.name, round)
        bodies: dict[bytes, bytes] = await ask(self._redis, "HGETALL", key)
        found = {member.decode(): msgspec.msgpack.decode(body, type=Change) for member, body in bodies.items()}
        first = min((change.published_ms for change in found.values()), default=0)
        return found, (await server_time_ms(self._redis, key) - first) / 1000 if found else 0.0

    async def turn(self, member: str) -> bool:
        """True if this run now has the turn to average; the turn expires after TURN_S."""
        return bool(await self._redis.set(keys.round_turn(self.name), member, nx=True, ex=TURN_S))

    async def turn_over(self) -> None:
        """End the present turn, so that another run may average."""
        await ask(self._redis, "DEL", keys.round_turn(self.name))

    async def close(self, before: ClosedRound, state: StoredParcel, taken: frozenset[str]) -> bool:
        """The next round is over with this average; False: it was before."""
        number = before.round + 1
        names = [
            keys.rounds(self.name),
            keys.round_bytes(self.name, state.id),
            keys.round_bytes(self.name, before.state.id),
            keys.round_deltas(self.name, number),
        ]
        body = msgspec.msgpack.encode(state)
        return bool(await _close(self._redis, names, [number, body, "\n".join(sorted(taken)), keys.ROUNDS_TTL_S]))
