"""A list of what is due: each entry has a time from which on one process may take it.

To take an entry moves its time into the future: that is the taker's lease. It renews the lease while it works, and a
taker that dies leaves the entry to whoever looks when the lease is over. So an entry has one owner at a time, what a
former owner says of it does not count, and it is there until its owner says that it is done.

An entry may be somebody's, a tenant's say. Those who have entries that are due take turns, so that the wait for a turn
depends on how many tenants there are, and not on how many entries another one has.
"""

import secrets
from collections.abc import Iterable
from typing import NamedTuple

from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import Argument, Script

_add = Script("due_add")
_take = Script("due_take")
_move = Script("due_move")
_hasten = Script("due_hasten")


class Due(NamedTuple):
    """An entry that is due, and whose it is."""

    who: str
    entry: str


class DueList:
    """The list of one name, as one process uses it."""

    def __init__(self, redis: Redis, name: str) -> None:
        self._redis = redis
        self._keys = [keys.due(name), keys.due_owners(name), keys.due_whose(name), keys.due_turns(name)]
        self._owner = secrets.token_hex(8)

    async def add(self, entry: str, in_ms: int = 0, who: str = "") -> None:
        """Add an entry that is due in `in_ms`; the time of an existing one stays. `who` takes turns with others."""
        await _add(self._redis, self._keys, [entry, in_ms, keys.DUE_TTL_S, who])

    async def take(self, most: int, lease_ms: int) -> list[str]:
        """Take at most `most` of the due entries, which no other process gets while the lease lasts."""
        return [due.entry for due in await self.take_in_turns(most, lease_ms)]

    async def take_in_turns(self, most: int, lease_ms: int, passing_over: Iterable[str] = ()) -> list[Due]:
        """As `take`, with the owner of each; `passing_over` names owners to leave out."""
        arguments: list[Argument] = [max(0, most), lease_ms, keys.DUE_TTL_S, self._owner, *passing_over]
        taken = [each.decode() for each in await _take(self._redis, self._keys, arguments)]
        return [Due(*pair) for pair in zip(taken[::2], taken[1::2], strict=True)]

    async def renew(self, entries: Iterable[str], lease_ms: int) -> None:
        """Renew the leases of entries that are still this process's."""
        await self._move("renew", lease_ms, entries)

    async def again(self, entries: Iterable[str], in_ms: int) -> None:
        """Give entries back, due in `in_ms` from now, or at once if `hasten` was called meanwhile."""
        await self._move("again", in_ms, entries)

    async def done(self, entry: str) -> None:
        """Remove an entry of this process's."""
        await self._move("done", 0, [entry])

    async def hasten(self, entry: str) -> None:
        """Make an entry due now, or as soon as its owner gives it back; nothing when it is not there."""
        await _hasten(self._redis, self._keys, [entry, keys.DUE_TTL_S])

    async def drop(self, entry: str) -> None:
        """Remove an entry, whichever process has it."""
        await self._move("drop", 0, [entry])

    async def _move(self, how: str, in_ms: int, entries: Iterable[str]) -> None:
        arguments: list[Argument] = [how, in_ms, keys.DUE_TTL_S, self._owner, *entries]
        await _move(self._redis, self._keys, arguments)
