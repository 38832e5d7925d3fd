"""Episodes of live traffic: the turns of each conversation whose answers are stored, by keeper and session id.

Invariants. A turn is written under its own name, so that writing it again changes nothing. An episode is bounded in
turns, those of a tenant in bytes, and one that is not used for the answers' time to live is deleted.
"""

import time
from collections import defaultdict
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from shared.episodes import MOST_TURNS, Turn
from shared.redis import keys
from shared.redis.connection.client import Argument, ask, ask_all
from shared.redis.kept.kept_things import KeptThings, Terms
from shared.signals import Calibration, Signal, calibrated, pairs_of

_ORDER = "sessions"
_TURN, _SIGNAL = b"turn:", b"signal:"
CALIBRATED_BY = 64
CALIBRATED_FOR_S = 60.0
MOST_CALIBRATIONS = 1_024  # keepers


class ListedEpisode(NamedTuple):
    """An episode in a list."""

    id: str
    turns: int
    used_ms: int  # when its last turn began
    user: str
    policy: str
    title: str  # how its first message begins


class StoredEpisode(NamedTuple):
    """The turns of an episode in no order, and signals by the turn's name."""

    turns: list[Turn]
    signals: dict[str, list[Signal]]


class EpisodeStore:
    """Episodes by keeper and session id."""

    def __init__(self, redis: Redis, terms: Terms) -> None:
        self._redis = redis
        self._terms = terms
        self._things = KeptThings(redis, terms)
        self._calibrations: dict[str, tuple[float, Calibration]] = {}

    async def add(self, keeper: str, turn: Turn) -> bool:
        """Store a turn; False when its episode is full, or larger than what the keeper may have."""
        session, order = turn.place.session, keys.kept_order(keeper, _ORDER)
        fields_now: list[bytes] = await ask(self._redis, "HKEYS", keys.kept(keeper, session))
        if sum(field.startswith(_TURN) for field in fields_now) >= MOST_TURNS:
            return _TURN + turn.name.encode() in fields_now
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

    async def signal(self, keeper: str, session: str, turn: str, signal: Signal) -> bool:
        """Store a signal of a turn, in the place of an earlier one of its kind; False when the episode is gone."""
        field = f"{_SIGNAL.decode()}{signal.kind}:{turn}"
        return await self._things.put(keeper, session, {field: msgspec.json.encode(signal)}, "there")

    async def read(self, keeper: str, session: str) -> StoredEpisode:
        """An episode; one without turns when it is not there."""
        fields: dict[bytes, bytes] = await ask(self._redis, "HGETALL", keys.kept(keeper, session))
        turns: list[Turn] = []
        signals: defaultdict[str, list[Signal]] = defaultdict(list)
        for name, value in sorted(fields.items()):
            if name.startswith(_TURN):
                turns.append(msgspec.json.decode(value, type=Turn))
            elif name.startswith(_SIGNAL):
                turn = name.split(b":", 2)[2].decode()
                signals[turn].append(msgspec.json.decode(value, type=Signal))
        return StoredEpisode(turns, dict(signals))

    async def calibration(self, keeper: str) -> Calibration:
        """Chances of the judge's labels, by the verdicts in the newest CALIBRATED_BY episodes.

        It is read anew after CALIBRATED_FOR_S, not for every session of a listing.
        """
        until, calibration = self._calibrations.get(keeper, (0.0, Calibration()))
        if time.monotonic() >= until:
            newest = await self.list(keeper, limit=CALIBRATED_BY)
            episodes = [await self.read(keeper, each.id) for each in newest]
            calibration = calibrated(pair for episode in episodes for pair in pairs_of(episode.signals))
            if len(self._calibrations) >= MOST_CALIBRATIONS:
                self._calibrations.clear()
            self._calibrations[keeper] = time.monotonic() + CALIBRATED_FOR_S, calibration
        return calibration

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
