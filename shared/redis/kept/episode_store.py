"""Episodes of live traffic: the turns of each conversation whose answers are stored, by keeper and session id.

Invariants. A turn is written under its own name, so that writing it again changes nothing. An episode is bounded in
turns, those of a tenant in bytes, and one that is not used for the answers' time to live is deleted.
"""

from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from shared.episodes import MOST_TURNS, Turn
from shared.redis import keys
from shared.redis.connection.client import Argument, ask, ask_all
from shared.redis.kept.kept_things import KeptThings, Terms

_ORDER = "sessions"
_TURN = b"turn:"


class ListedEpisode(NamedTuple):
    """An episode in a list."""

    id: str
    turns: int
    used_ms: int  # when its last turn began
    user: str
    policy: str
    title: str  # how its first message begins


class EpisodeStore:
    """Episodes by keeper and session id."""

    def __init__(self, redis: Redis, terms: Terms) -> None:
        self._redis = redis
        self._terms = terms
        self._things = KeptThings(redis, terms)

    async def add(self, keeper: str, turn: Turn) -> bool:
        """Store a turn; False when its episode is full, or larger than what the keeper may have."""
        session, order = turn.place.session, keys.kept_order(keeper, _ORDER)
        if int(await ask(self._redis, "HLEN", keys.kept(keeper, session))) > MOST_TURNS:
            return False
        fields: dict[str, Argument] = {_TURN.decode() + turn.name: msgspec.json.encode(turn)}
        fields |= {"policy": turn.policy, "user": turn.place.user}
        if not turn.place.before and turn.place.said:
            fields["title"] = turn.place.said[-1].text[:160]
        commands: list[tuple[Argument, ...]] = [
            ("ZREMRANGEBYSCORE", order, "-inf", turn.created_ms - 1000 * self._terms.ttl_s),
            ("ZADD", order, "GT", turn.created_ms, session),
            ("EXPIRE", order, self._terms.ttl_s),
        ]
        await ask_all(self._redis, commands)
        return await self._things.put(keeper, session, fields)

    async def turns(self, keeper: str, session: str) -> list[Turn]:
        """The turns of an episode in no order; none when it is not there."""
        fields: dict[bytes, bytes] = await ask(self._redis, "HGETALL", keys.kept(keeper, session))
        found = [value for name, value in fields.items() if name.startswith(_TURN)]
        return [msgspec.json.decode(value, type=Turn) for value in found]

    async def list(self, keeper: str, *, after: str = "", limit: int = 20) -> list[ListedEpisode]:
        """Episodes by their last turn, the newest first, those after `after`."""
        order = keys.kept_order(keeper, _ORDER)
        rank = await ask(self._redis, "ZREVRANK", order, after) if after else None
        start = 0 if rank is None else int(rank) + 1
        page = await ask(self._redis, "ZREVRANGE", order, start, start + limit - 1, "WITHSCORES")
        if isinstance(page[0] if page else None, list):
            page = [part for pair in page for part in pair]
        names = [name.decode() for name in page[::2]]
        looks: list[tuple[Argument, ...]] = []
        for name in names:
            key = keys.kept(keeper, name)
            looks += [("HKEYS", key), ("HMGET", key, "user", "policy", "title")]
        answers = await ask_all(self._redis, looks)
        found = []
        for name, score, fields, row in zip(names, page[1::2], answers[::2], answers[1::2], strict=True):
            user, policy, title = ((value or b"").decode() for value in row)
            turns = sum(field.startswith(_TURN) for field in fields)
            if turns:
                found.append(ListedEpisode(name, turns, int(float(score)), user, policy, title))
        return found

    async def forget(self, keeper: str, session: str) -> bool:
        """Delete an episode; False when it was not there. Its answers are another store's."""
        return await self._things.forget(keeper, session)


def episodes_of(tenant: str) -> str:
    """Keeper of a tenant's episodes in names of keys, another than that of its answers."""
    return keys.keeper(f"episodes of {tenant}")
