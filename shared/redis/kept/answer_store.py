"""Answers of live traffic that wait for a verdict, and judged ones.

Invariants. An answer is judged once: the first verdict stands, and repeating it changes nothing. A verdict that was
reported as counted is on the due list until a job runner has put what it judges into the queue of the policy's trainer.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import Argument, Script, ask, ask_all
from shared.redis.due.due_list import DueList
from shared.redis.kept.kept_things import KeptThings, Terms
from shared.trajectories import LiveTrajectory

LIST = "feedback"  # the name of the due list, of answers whose verdict is on its way: "<keeper> <ttl> <bytes> <name>"
LOOKED_AT = 1_000  # answers that one listing reads at most
DELAY_MS = 5_000  # until a verdict is looked at whose api has died
YOUNG_MS = 60_000  # an answer is listed before it is there
_ORDERS = ("waiting", "judged")

_judge = Script("kept_judge")


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """A client's judgement of an answer."""

    reward: float
    over: str = ""  # the name of the answer that it was preferred to
    under: str = ""  # or of the one that was preferred to it
    text: str = ""
    by: str = ""  # "session": it follows from the session's signals, not from a person's verdict
    confidence: float = 1.0


class StoredAnswer(NamedTuple):
    """An answer with its verdict, as stored."""

    name: str
    id: str  # of the trajectory that it would be
    policy: str
    packed: bytes  # of that trajectory: `live_of`
    note: str  # a comment without a verdict
    verdict: Verdict | None
    key: str  # the idempotency key of the verdict
    delivered: bool  # to the trainer's queue
    session: str = ""  # of the episode that it is a turn of


class AnswerStore:
    """Answers by keeper and name; a name is what the client knows the answer by, and the number of the choice."""

    def __init__(self, redis: Redis, terms: Terms) -> None:
        self._redis = redis
        self._terms = terms
        self._things = KeptThings(redis, terms)
        self._due = DueList(redis, LIST)

    async def keep(self, name: str, live: LiveTrajectory, session: str = "") -> bool:
        """Store an answer; False when it is there. QueueFullError for one that is too large.

        Another one of this name goes: a client may use its own names again.
        """
        keeper = answers_of(live.tenant)
        before = await self.find(keeper, name)
        if before is not None and (before.id == live.id or (before.verdict is not None and not before.delivered)):
            return False
        if before is not None:
            await self._things.forget(keeper, name)
        order, ttl_s = keys.kept_order(keeper, _ORDERS[0]), self._terms.ttl_s
        commands: list[tuple[Argument, ...]] = [
            ("ZREMRANGEBYSCORE", order, "-inf", live.collected_ms - 1000 * ttl_s),
            ("ZADD", order, live.collected_ms, name),
            ("EXPIRE", order, ttl_s),
        ]
        await ask_all(self._redis, commands)
        fields: dict[str, Argument] = {"id": live.id, "policy": live.policy, "live": _packed(live), "session": session}
        return await self._things.put(keeper, name, fields, "new")

    async def find(self, keeper: str, name: str) -> StoredAnswer | None:
        """An answer; None when the keeper has none of this name."""
        return _answer(name, await ask(self._redis, "HMGET", keys.kept(keeper, name), *_FIELDS))

    async def note(self, keeper: str, name: str, text: str) -> bool:
        """Store a comment on an answer, without a verdict; False when the answer is not there."""
        return await self._things.put(keeper, name, {"note": text}, "there")

    async def judge(self, keeper: str, verdicts: dict[str, Verdict], key: str = "") -> bool:
        """Give verdicts to answers by name, to all or to none of them; the first one is put on the due list.

        False when one has another verdict, or is not there.
        """
        first = next(iter(verdicts))
        names = [*self._things.names(keeper, first)[1:], *(keys.kept_order(keeper, each) for each in _ORDERS)]
        names += [keys.kept(keeper, name) for name in verdicts]
        arguments = self._things.arguments(keeper, first)
        told = [part for name, verdict in verdicts.items() for part in (name, msgspec.json.encode(verdict))]
        entry = f"{keeper} {self._terms.ttl_s} {self._terms.bytes} {first}"
        await self._due.add(entry, DELAY_MS)  # so that it is there even if this process dies after the verdict
        if await _judge(self._redis, names, [arguments[0], *arguments[2:], key, *told]) == 0:
            return False
        await self._due.add(entry)
        await self._due.hasten(entry)
        return True

    async def forget(self, keeper: str, name: str) -> bool:
        """Delete an answer; False when it was not there. What a trainer has received of it stays there."""
        return await self._things.forget(keeper, name)

    async def delivered(self, keeper: str, name: str) -> None:
        """Record that the answer has been put into the trainer's queue."""
        await self._things.put(keeper, name, {"delivered": 1}, "there")

    async def list(self, keeper: str, *, judged: bool, after: str = "", limit: int = 20) -> list[StoredAnswer]:
        """Answers with or without a verdict, the newest first, those after `after`."""
        order = keys.kept_order(keeper, _ORDERS[judged])
        rank = await ask(self._redis, "ZREVRANK", order, after) if after else None
        found: list[StoredAnswer] = []
        gone: list[str] = []
        start = 0 if rank is None else int(rank) + 1
        until = start + LOOKED_AT
        while len(found) < limit and start < until:
            page = await ask(self._redis, "ZREVRANGE", order, start, start + limit - len(found) - 1)
            for name in (each.decode() for each in page):
                answer = await self.find(keeper, name)
                if answer is None or (answer.verdict is not None) != judged:
                    gone.append(name)
                else:
                    found.append(answer)
            start += len(page)
            if not page:
                break
        if gone:
            await self._forget(order, gone)
        return found

    async def newest(self, keepers: Sequence[str], limit: int) -> Sequence[tuple[str, StoredAnswer]]:
        """The newest answers of all of these that wait for a verdict, each with its keeper."""
        orders = [keys.kept_order(keeper, _ORDERS[0]) for keeper in keepers]
        looked = [("ZREVRANGE", order, 0, 2 * limit - 1, "WITHSCORES") for order in orders]
        named = [
            (float(score), keeper, name.decode())
            for keeper, page in zip(keepers, await ask_all(self._redis, looked), strict=True)
            for name, score in zip(page[::2], page[1::2], strict=True)
        ]
        chosen = sorted(named, reverse=True)[: 2 * limit]  # some may be gone
        rows = await ask_all(self._redis, [("HMGET", keys.kept(keeper, name), *_FIELDS) for _, keeper, name in chosen])
        found = [(keeper, _answer(name, row)) for (_, keeper, name), row in zip(chosen, rows, strict=True)]
        return [(keeper, each) for keeper, each in found if each is not None and each.verdict is None][:limit]

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


def live_of(answer: StoredAnswer) -> LiveTrajectory:
    """The trajectory that it would be; takes milliseconds for a long one."""
    return msgspec.json.decode(answer.packed, type=LiveTrajectory)


def answers_of(tenant: str) -> str:
    """Keeper of a tenant's answers in names of keys, another than that of its responses."""
    return keys.keeper(f"answers of {tenant}")


_FIELDS = ("id", "policy", "live", "note", "verdict", "key", "delivered", "session")


def _packed(live: LiveTrajectory) -> bytes:
    """Encode an answer without the fields that no trainer reads, which may be large."""
    trajectory = msgspec.structs.replace(
        live.trajectory, top_logprobs=(), prompt_logprobs=(), prompt_top_logprobs=(), embedding=b""
    )
    return msgspec.json.encode(msgspec.structs.replace(live, trajectory=trajectory))


def _answer(name: str, row: Sequence[bytes | None]) -> StoredAnswer | None:
    id_, policy, live, note, verdict, key, delivered, session = row
    if id_ is None or policy is None or live is None:
        return None
    return StoredAnswer(
        name,
        id_.decode(),
        policy.decode(),
        live,
        (note or b"").decode(),
        None if verdict is None else msgspec.json.decode(verdict, type=Verdict),
        (key or b"").decode(),
        delivered is not None,
        (session or b"").decode(),
    )
