"""A run whose train steps several processes share: its leader, its members, their messages, and their bytes.

Invariants.
- One process leads: a new one raises the epoch, and the one before is refused from then on. Words and answers carry
  the epoch that they belong to, so those of a former one are known.
- Words and answers are read from a place in their stream: reading them again changes nothing, and a broken connection
  loses none.
- Everything has a time to live and a bound.
"""

from dataclasses import dataclass

from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import Argument, Script, ask
from shared.redis.training.parcels import Parcels
from shared.redis.training.presence import Presence

_MOST_WORDS = 256
_lead = Script("shared_lead")
_leave = Script("shared_leave")


@dataclass(frozen=True)
class RunNow:
    """A run that has a leader, or that had one until its end."""

    epoch: str
    spec: bytes
    ended: bool


class SharedRun:
    """One run, for its leader and for its members."""

    def __init__(self, redis: Redis, name: str, *, blocking: Redis) -> None:
        self._redis, self._blocking, self.name = redis, blocking, name
        self.parcels = Parcels(redis, lambda id: keys.shared_bytes(name, id))
        self.members = Presence(redis, keys.shared_members(name))

    # -- the leader

    async def lead(self, epoch: str, spec: bytes, *, begin: bool) -> bool:
        """Take the lead, or (with `begin` False) renew it; False when another process leads."""
        args: list[Argument] = [epoch, spec, keys.SHARED_RUN_TTL_S, int(begin)]
        return bool(await _lead(self._redis, [keys.shared_run(self.name)], args))

    async def leave(self, epoch: str, *, done: bool) -> None:
        """End the lead; `done`: the run ends too, and its members are notified."""
        await _leave(self._redis, [keys.shared_run(self.name)], [epoch, int(done), 6 * keys.SHARED_RUN_TTL_S])

    async def send(self, word: bytes) -> None:
        """Send a message to all members."""
        await self._add(keys.shared_words(self.name), word)

    async def answers(self, after: str, within_s: float) -> list[tuple[str, bytes]]:
        """Messages of members after a stream position, each with its position; waits up to `within_s` for one."""
        return await self._behind(keys.shared_answers(self.name), after, within_s)

    async def answers_end(self) -> str:
        """The place of the last answer."""
        return await self._end(keys.shared_answers(self.name))

    # -- a member

    async def now(self) -> RunNow | None:
        """The run as it is; None: no process leads it."""
        epoch, spec, ended = await ask(self._redis, "HMGET", keys.shared_run(self.name), "epoch", "spec", "ended")
        return None if epoch is None else RunNow(epoch.decode(), spec, ended is not None)

    async def answer(self, body: bytes) -> None:
        """Send a message to the leader."""
        await self._add(keys.shared_answers(self.name), body)

    async def words(self, after: str, within_s: float) -> list[tuple[str, bytes]]:
        """Messages of the leader after a stream position, each with its position; waits up to `within_s` for one."""
        return await self._behind(keys.shared_words(self.name), after, within_s)

    async def words_end(self) -> str:
        """The place of the last word."""
        return await self._end(keys.shared_words(self.name))

    async def _add(self, stream: str, body: bytes) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xadd(stream, {"d": body}, maxlen=_MOST_WORDS)
            pipe.expire(stream, keys.SHARED_WORDS_TTL_S)
            await pipe.execute()

    async def _end(self, stream: str) -> str:
        last = await self._redis.xrevrange(stream, count=1)
        return last[0][0].decode() if last else "0-0"

    async def _behind(self, stream: str, after: str, within_s: float) -> list[tuple[str, bytes]]:
        found = await self._blocking.xread({stream: after}, block=max(1, int(1000 * within_s)))
        return [(entry.decode(), fields[b"d"]) for _, entries in found for entry, fields in entries]
