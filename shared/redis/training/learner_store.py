"""Learners of the training service in Redis: their requests, answers, states and saves.

Invariants.
- A request is placed under its number, once: to place it again changes nothing, whatever became of it.
- A learner is one service's at a time. Taking it raises its epoch, and what is written under an older one is refused.
- A state counts together with the number of the last request that it holds (`applied`). Requests after it are kept, and
  whoever takes the learner carries them out again: what was answered before (`done`) is computed and not answered a
  second time. So no request is lost and none is applied twice, wherever a service dies.
- Bytes first, then what points to them: what is torn is invisible, and gone after ADAPTER_UPLOAD_TTL_S.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import msgspec
from redis.asyncio import Redis

from shared.errors import ConflictError, NotFoundError, QueueFullError
from shared.learners import Answer, LearnerSpec, Request, SaveInfo, ServiceCard
from shared.redis import keys
from shared.redis.chunks import Chunks
from shared.redis.connection.client import Argument, Script, ask
from shared.redis.due.due_list import DueList
from shared.redis.poll import poll
from shared.redis.stored import StoredMessage

MOST_WAITING = 256  # requests of a learner that its state does not hold yet
MOST_BYTES = 2**27  # and their size

_create = Script("learner_create")
_place = Script("learner_place")
_take = Script("learner_take")
_try = Script("learner_try")
_drop = Script("learner_drop")
_answer = Script("learner_answer")
_change_save = Script("learner_change_save")
_request_decoder = msgspec.msgpack.Decoder(Request)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


@dataclass(frozen=True)
class HeldLearner:
    """A learner that a service has taken."""

    id: str
    epoch: str
    spec: LearnerSpec
    done: int  # number of the last request that was answered
    applied: int  # of the last one that the state holds
    state: str  # "": it has only its first weights


def waiting_learners(redis: Redis, model: str) -> DueList:
    """The learners of a model that a service should look at."""
    return DueList(redis, f"learners:{model}")


class LearnerStore:
    """All learners of a ring."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._services = StoredMessage(redis, ServiceCard, keys.LEARNER_SERVICE_TTL_S)

    # -- who asks

    async def create(self, spec: LearnerSpec) -> LearnerSpec:
        """Make a learner; returns the existing one if there is one under this id."""
        args: list[Argument] = [msgspec.json.encode(spec), keys.LEARNER_TTL_S]
        return msgspec.json.decode(await _create(self._redis, [keys.learner(spec.id)], args), type=LearnerSpec)

    async def spec(self, learner: str) -> LearnerSpec:
        """Definition of a learner; NotFoundError."""
        raw = await ask(self._redis, "HGET", keys.learner(learner), "spec")
        if raw is None:
            raise NotFoundError("there is no such learner, or its time to live is over")
        return msgspec.json.decode(raw, type=LearnerSpec)

    async def place(self, spec: LearnerSpec, number: int, request: Request) -> None:
        """Ask a learner; the same number again changes nothing.

        NotFoundError when it is gone, QueueFullError when too much waits, ConflictError when numbers are left out.
        """
        body = await asyncio.to_thread(msgspec.msgpack.encode, request)
        names = [keys.learner(spec.id), keys.learner_requests(spec.id)]
        said = await _place(self._redis, names, [number, body, keys.LEARNER_TTL_S, MOST_WAITING, MOST_BYTES])
        if said == -1:
            raise NotFoundError("there is no such learner, or its time to live is over")
        if said == -2:
            raise ConflictError(f"request {number} is far ahead of those that were asked before")
        if said == 0:
            raise QueueFullError("this learner has as many requests waiting as it may have; try again shortly")
        await self.wake(spec)

    async def wake(self, spec: LearnerSpec) -> None:
        """Have a service look at a learner."""
        due = waiting_learners(self._redis, spec.model)
        await due.add(spec.id, who=spec.owner)
        await due.hasten(spec.id)

    async def answer(self, learner: str, number: int, within_s: float = 0.0) -> Answer | None:
        """The answer to a request; None when there is none in time.

        NotFoundError when the learner is gone, or the answer's time to live is over.
        """

        async def look() -> bytes | None:
            raw: bytes | None = await self._redis.get(keys.learner_answer(learner, number))
            if raw is None:
                await self._not_over(learner, number)
            return raw

        raw = await poll(look, within_s)
        return None if raw is None else await asyncio.to_thread(_answer_decoder.decode, raw)

    async def _not_over(self, learner: str, number: int) -> None:
        spec, done = await ask(self._redis, "HMGET", keys.learner(learner), "spec", "done")
        if spec is None:
            raise NotFoundError("there is no such learner, or its time to live is over")
        if int(done or 0) >= number and not await self._redis.exists(keys.learner_answer(learner, number)):
            raise NotFoundError("the answer to this request is not stored any more")

    async def saves(self, learner: str, *, expired: bool = False) -> list[SaveInfo]:
        """Saves and published versions that have not expired, or the expired ones; oldest first."""
        now = time.time_ns() // 1_000_000
        found = [info for info in await self.all_saves(learner) if (info.expires_ms <= now) == expired]
        return sorted(found, key=lambda info: info.created_ms)

    async def all_saves(self, learner: str) -> list[SaveInfo]:
        raw = await ask(self._redis, "HVALS", keys.learner_saves(learner))
        return [msgspec.json.decode(each, type=SaveInfo) for each in raw]

    async def save_named(self, learner: str, kind: str, name: str) -> SaveInfo:
        """NotFoundError when there is none, or it has expired."""
        raw = await ask(self._redis, "HGET", keys.learner_saves(learner), f"{kind}/{name}")
        info = None if raw is None else msgspec.json.decode(raw, type=SaveInfo)
        if info is None or info.expires_ms <= time.time_ns() // 1_000_000:
            raise NotFoundError(f"there is no save {name!r} of this learner, or its time to live is over")
        return info

    async def drop_save(self, learner: str, info: SaveInfo) -> bool:
        """Forget a save; False when it is gone already, or another one has its name."""
        return await self._change_save(learner, info, None, 0)

    async def keep_save(self, learner: str, info: SaveInfo, lives_s: int) -> bool:
        """Set a save's time to live from now on; False as for `drop_save`."""
        later = msgspec.structs.replace(info, expires_ms=1000 * (int(time.time()) + lives_s))
        return await self._change_save(learner, info, later, lives_s)

    async def _change_save(self, learner: str, info: SaveInfo, later: SaveInfo | None, lives_s: int) -> bool:
        name = f"{info.kind}/{info.name}"
        raw = await ask(self._redis, "HGET", keys.learner_saves(learner), name)
        if raw is None or msgspec.json.decode(raw, type=SaveInfo) != info:
            return False
        wanted = b"" if later is None else msgspec.json.encode(later)
        names = [keys.learner_saves(learner), keys.learner_saved(learner, info.bytes_id)]
        return bool(await _change_save(self._redis, names, [name, raw, wanted, lives_s, keys.LEARNER_SAVE_TTL_S]))

    async def drop(self, model: str, learner: str) -> None:
        """Forget a learner with all that it has; its answers go by themselves. A service that has it is refused."""
        state = await _drop(self._redis, [keys.learner(learner), keys.learner_requests(learner)], [])
        saves = await self.all_saves(learner)  # only now can no process add to them
        names = [keys.learner_saved(learner, save.bytes_id) for save in saves if save.bytes_id]
        if state:
            names.append(keys.learner_state(learner, state.decode()))
        for name in [*names, keys.learner_saves(learner)]:  # one by one: bytes of many megabytes are not freed at once
            await ask(self._redis, "UNLINK", name)
        await waiting_learners(self._redis, model).drop(learner)

    async def knows(self, learner: str, number: int) -> bool:
        """True if a request of this number has been placed, answered or not."""
        done = await ask(self._redis, "HGET", keys.learner(learner), "done")
        return int(done or 0) >= number or await self.waits(learner, number)

    # -- who does it

    async def take(self, learner: str) -> HeldLearner | None:
        """Own a learner; None when it is gone."""
        names = [keys.learner(learner), keys.learner_requests(learner)]
        found = await _take(self._redis, names, [keys.LEARNER_TTL_S])
        if not found:
            return None
        epoch, spec, done, applied, state = found
        what = msgspec.json.decode(spec, type=LearnerSpec)
        return HeldLearner(learner, epoch.decode(), what, int(done or 0), int(applied or 0), (state or b"").decode())

    async def is_asked(self, learner: str) -> bool:
        """True if a request waits to be carried out, or the learner is gone."""
        spec, done, applied = await ask(self._redis, "HMGET", keys.learner(learner), "spec", "done", "applied")
        return spec is None or (done or 0) != (applied or 0) or await self.waits(learner, int(done or 0) + 1)

    async def request(self, learner: str, number: int) -> tuple[Request, int] | None:
        """A request and its size in bytes, when it is there."""
        raw = await ask(self._redis, "HGET", keys.learner_requests(learner), number)
        return None if raw is None else (await asyncio.to_thread(_request_decoder.decode, raw), len(raw))

    async def waits(self, learner: str, number: int) -> bool:
        """True if a request of this number is stored and not yet answered."""
        return bool(await ask(self._redis, "HEXISTS", keys.learner_requests(learner), number))

    async def tries(self, learner: str, number: int) -> int:
        """Number of times that a request was begun without coming to an end."""
        trying, tries = await ask(self._redis, "HMGET", keys.learner(learner), "trying", "tries")
        return int(tries) if trying == str(number).encode() else 0

    async def begun(self, held: HeldLearner, number: int) -> int:
        """Note that a request is carried out: how often it was and came to no end, 0 when another service has it."""
        return int(await _try(self._redis, [keys.learner(held.id)], [held.epoch, number]))

    async def ended(self, held: HeldLearner) -> None:
        """It has come to an end, whatever became of it."""
        await _try(self._redis, [keys.learner(held.id)], [held.epoch, ""])

    async def put_answer(
        self,
        held: HeldLearner,
        number: int,
        answer: Answer | None,
        *,
        state: str = "",
        before: str = "",
        save: SaveInfo | None = None,
    ) -> bool:
        """Answer a request; with `state` (put by `put_state`, in place of `before`) that holds it; with a save.

        All of it counts at once. False when another service has the learner now.
        """
        name, replaced = ("", "") if save is None else (f"{save.kind}/{save.name}", save.bytes_id)
        if save is not None:
            raw = await ask(self._redis, "HGET", keys.learner_saves(held.id), name)
            replaced = msgspec.json.decode(raw, type=SaveInfo).bytes_id if raw else replaced
        lives_s = 1 if save is None else max(1, save.expires_ms // 1000 - int(time.time()))
        said = await _answer(
            self._redis,
            [
                keys.learner(held.id),
                keys.learner_requests(held.id),
                keys.learner_answer(held.id, number),
                keys.learner_state(held.id, state),
                keys.learner_state(held.id, before),
                keys.learner_saves(held.id),
                keys.learner_saved(held.id, "" if save is None else save.bytes_id),
                keys.learner_saved(held.id, replaced),
            ],
            [
                held.epoch,
                number,
                b"" if answer is None else await asyncio.to_thread(msgspec.msgpack.encode, answer),
                keys.LEARNER_ANSWER_TTL_S,
                keys.LEARNER_TTL_S,
                state,
                name,
                b"" if save is None else msgspec.json.encode(save),
                lives_s,
                keys.LEARNER_SAVE_TTL_S,
            ],
        )
        return bool(said)

    async def put_state(self, learner: str, state: bytes) -> str:
        """Store a state that nothing points to yet; its id."""
        name = secrets.token_hex(8)
        await Chunks(self._redis, keys.learner_state(learner, name)).write(state)
        return name

    async def put_saved(self, learner: str, state: bytes) -> str:
        """Store a save's state that nothing points to yet; its id."""
        name = secrets.token_hex(8)
        await Chunks(self._redis, keys.learner_saved(learner, name)).write(state)
        return name

    async def put_asked(self, learner: str, body: bytes) -> str:
        """Store what is asked where it is too large for a request; it stays as long as an answer does."""
        name = secrets.token_hex(8)
        key = keys.learner_saved(learner, name)
        await Chunks(self._redis, key).write(body)
        await ask(self._redis, "EXPIRE", key, keys.LEARNER_ANSWER_TTL_S)
        return name

    async def asked(self, learner: str, name: str) -> bytes:
        """The bytes that `put_asked` has stored; NotFoundError."""
        return await Chunks(self._redis, keys.learner_saved(learner, name)).read()

    async def drop_asked(self, learner: str, name: str) -> None:
        """It is not needed any more."""
        await ask(self._redis, "UNLINK", keys.learner_saved(learner, name))

    async def state(self, held: HeldLearner) -> bytes:
        """The bytes of a learner's present state."""
        return await Chunks(self._redis, keys.learner_state(held.id, held.state)).read()

    async def saved(self, learner: str, name: str) -> bytes:
        """The bytes of a save; NotFoundError."""
        info = await self.save_named(learner, "state", name)
        return await Chunks(self._redis, keys.learner_saved(learner, info.bytes_id)).read()

    def saved_pieces(self, learner: str, info: SaveInfo) -> AsyncIterator[bytes]:
        """The bytes of a save as they come; NotFoundError when they are gone."""
        return Chunks(self._redis, keys.learner_saved(learner, info.bytes_id)).stored()

    # -- services

    async def announce(self, card: ServiceCard) -> None:
        """Write the heartbeat of a service."""
        await self._services.put(keys.learner_service(card.model), card)

    async def service(self, model: str) -> ServiceCard | None:
        """A service that trains learners of this model, if one lives."""
        return await self._services.find(keys.learner_service(model))

    async def services(self, models: Iterable[str]) -> list[ServiceCard]:
        """The services that live, at most one for each model."""
        found = await asyncio.gather(*map(self.service, models))
        return [card for card in found if card is not None]
