"""Answers of live traffic that wait for a verdict, and those that got one.

Invariants. An answer is judged once: the first verdict stands, and to say it again changes nothing. A verdict that was
told as counted is on the due list until a job runner has put what it judges into the queue of the policy's trainer.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import Argument, Script, ask, ask_all
from shared.redis.due.due_list import DueList
from shared.redis.kept.keeping import Keeping, Terms
from shared.trajectories import LiveTrajectory

LIST = "feedback"  # the name of the due list, of answers whose verdict is on its way: "<keeper> <ttl> <bytes> <name>"
LOOKED_AT = 1_000  # answers that one listing reads at most
YOUNG_MS = 60_000  # an answer is listed before it is there
_ORDERS = ("waiting", "judged")

_judge = Script("kept_judge")


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """What somebody says of an answer."""

    reward: float
    over: str = ""  # the name of the answer that it was preferred to
    under: str = ""  # or of the one that was preferred to it
    text: str = ""


class Answer(NamedTuple):
    """An answer as it is kept."""

    name: str
    live: LiveTrajectory
    note: str  # what somebody wrote of it, without a verdict
    verdict: Verdict | None
    key: str  # the idempotency key of the verdict
    delivered: bool  # to the trainer's queue


class AnswerStore:
    """Answers by keeper and name; a name is what the client knows the answer by, and the number of the choice."""

    def __init__(self, redis: Redis, terms: Terms) -> None:
        self._redis = redis
        self._terms = terms
        self._keeping = Keeping(redis, terms)
        self._due = DueList(redis, LIST)

    async def keep(self, name: str, live: LiveTrajectory) -> bool:
        """Keep an answer; False when there is one of this name. QueueFullError for one that is too large."""
        keeper = answers_of(live.tenant)
        order = keys.kept_order(keeper, _ORDERS[0])
        fields: dict[str, Argument] = {"live": msgspec.json.encode(live)}
        ttl_s = self._terms.ttl_s
        await ask_all(self._redis, [("ZADD", order, live.collected_ms, name), ("EXPIRE", order, ttl_s)])
        return await self._keeping.put(keeper, name, fields, "new")

    async def find(self, keeper: str, name: str) -> Answer | None:
        """An answer; None when the keeper has none of this name."""
        return _answer(name, await ask(self._redis, "HMGET", keys.kept(keeper, name), *_FIELDS))

    async def note(self, keeper: str, name: str, text: str) -> bool:
        """Write down what somebody says of an answer without judging it; False when it is not there."""
        return await self._keeping.put(keeper, name, {"note": text}, "there")

    async def judge(self, keeper: str, verdicts: dict[str, Verdict], key: str = "") -> bool:
        """Give verdicts to answers by name, to all or to none of them; one of several that was not there is in none.

        False when one has another verdict, or is not there. The first answer is put on the due list.
        """
        first = next(iter(verdicts))
        names = [*self._keeping.names(keeper, first)[1:], *(keys.kept_order(keeper, each) for each in _ORDERS)]
        names += [keys.kept(keeper, name) for name in verdicts]
        arguments = self._keeping.arguments(keeper, first)
        told = [part for name, verdict in verdicts.items() for part in (name, msgspec.json.encode(verdict))]
        if await _judge(self._redis, names, [arguments[0], *arguments[2:], key, *told]) == 0:
            return False
        await self._due.add(f"{keeper} {self._terms.ttl_s} {self._terms.bytes} {first}")
        return True

    async def delivered(self, keeper: str, name: str) -> None:
        """What an answer's verdict is about is in the trainer's queue."""
        await self._keeping.put(keeper, name, {"delivered": 1}, "there")

    async def list(self, keeper: str, *, judged: bool, after: str = "", limit: int = 20) -> list[Answer]:
        """Answers with or without a verdict, the newest first, from behind `after`; each may be large."""
        order = keys.kept_order(keeper, _ORDERS[judged])
        below = "+inf"
        if after and (last := await self.find(keeper, after)) is not None:
            below = f"({last.live.collected_ms}"
        found: list[Answer] = []
        gone: list[str] = []
        start = 0
        while len(found) < limit and start < LOOKED_AT:
            page = await ask(self._redis, "ZREVRANGEBYSCORE", order, below, "-inf", "LIMIT", start, limit)
            for name in (each.decode() for each in page[: limit - len(found)]):
                answer = await self.find(keeper, name)
                if answer is None or (answer.verdict is not None) != judged:
                    gone.append(name)
                else:
                    found.append(answer)
            start += limit
            if len(page) < limit:
                break
        if gone:
            await self._forget(order, gone)
        return found

    async def _forget(self, order: str, names: Sequence[str]) -> None:
        """Let go of names without an answer; a young one's may be on its way."""
        before = int(1000 * time.time()) - YOUNG_MS
        scores = await ask(self._redis, "ZMSCORE", order, *names)
        old = [name for name, score in zip(names, scores, strict=True) if score is not None and float(score) < before]
        if old:
            await ask(self._redis, "ZREM", order, *old)


def due_answer(entry: str) -> tuple[str, Terms, str]:
    """Keeper, terms and name of an answer on the due list; ValueError for what is none."""
    keeper, ttl_s, size, name = entry.split(" ", 3)
    return keeper, Terms(int(ttl_s), int(size)), name


_FIELDS = ("live", "note", "verdict", "key", "delivered")


def answers_of(tenant: str) -> str:
    """Whose answers these are, in names of keys: a tenant keeps them apart from its responses."""
    return keys.keeper(f"answers of {tenant}")


def _answer(name: str, row: Sequence[bytes | None]) -> Answer | None:
    live, note, verdict, key, delivered = row
    if live is None:
        return None
    return Answer(
        name,
        msgspec.json.decode(live, type=LiveTrajectory),
        (note or b"").decode(),
        None if verdict is None else msgspec.json.decode(verdict, type=Verdict),
        (key or b"").decode(),
        delivered is not None,
    )
