"""The ring's workers and models: model cards and tokenizers, and the workers' heartbeats.

A worker is live while its heartbeat hash exists (10 s). Cards and tokenizers stay for a week after the last worker, so
that jobs can be planned while no worker is up.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Literal

import msgspec
import structlog
from redis.asyncio import Redis

from shared.errors import NotFoundError, SetupError
from shared.machine.status import MachineStatus
from shared.ranks import RankStatus
from shared.redis import keys
from shared.redis.connection.client import Script, ask_all, members, server_time_ms
from shared.redis.processes.shared_look import SharedLook
from shared.sequences import ModelCard
from shared.text.codec import TokenizerBundle

log = structlog.get_logger()

SOURCES_KEPT = 8
PATIENCE_S = keys.WORKER_TTL_S + 2.0  # with workers of other weights: dead ones are gone by then
LOOK_AGAIN_S = 1.0
READY_WITHIN_S = 3.0  # a worker that was let in
REPORT_AFTER_S = PATIENCE_S + keys.WORKER_TTL_S + 2.0  # one that is refused has gone by then, and its weights with it
FEW = 32  # workers of a model, up to which one that joins reads all heartbeats
MANY = 64  # workers of a model, from which on processes look at heartbeats for one another
AT_ONCE = 128  # heartbeats in one round trip

_WEIGHTS = Script("weights")

WorkerState = Literal["starting", "ready", "paused", "draining", "stuck"]


class WorkerStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """One heartbeat of a worker."""

    id: str
    model: str
    host: str
    pid: int
    state: WorkerState
    rows: int
    max_rows: int
    waiting: int  # claimed, not yet in a row
    kv_bytes: int
    kv_limit_bytes: int
    tokens_per_s: float
    steps: int
    started_ms: int
    heartbeat_ms: int
    adapters: dict[str, int] = {}  # name -> version that is loaded
    extra: dict[str, float] = {}
    engine_silent_s: float = 0.0  # since the engine's turn under way began
    pause: str = ""  # id of the pause that it has come to rest under
    weights: str = ""  # what it computes with: `weights_of` its card
    versions: tuple[str, ...] = ()  # every adapter version that is loaded, as name@k
    kv_address: str = ""  # HOST:PORT where other workers fetch KV; "": they cannot
    speculation: str = "none"  # what tokens are drafted from: a mode of --spec-decode, or "none: " and why not
    draft_model: str = ""  # that drafts, too; "": there is none, or it has failed
    ranks: tuple[RankStatus, ...] = ()  # that hold the model together; (): this process holds all of it
    machine: MachineStatus = MachineStatus()
    court: str = ""  # its tokens, as other workers found them: wrong (two did), disputed (one did); "": right


def weights_of(card: ModelCard) -> str:
    """Hashes of what a worker's tokens depend on besides the request."""
    kv = f", KV of {card.kv}" if card.kv else ""
    return f"weights {card.base_sha256[:12]}, dtype {card.dtype}, tokenizer {card.tokenizer_sha256[:12]}{kv}"


class WorkerRegistry:
    """Heartbeats of all workers, in Redis."""

    def __init__(self, redis: "Redis", *, shares: bool = False) -> None:
        """`shares`: in a large ring other processes' looks at the workers serve here, too, and ours there."""
        self._redis, self._shares = redis, shares
        self._live = SharedLook(redis, keys.live_workers, list[str])
        self._statuses = SharedLook(redis, keys.live_statuses, list[WorkerStatus])
        self._registered: dict[str, tuple[ModelCard, TokenizerBundle]] = {}

    async def register_model(self, card: ModelCard, tokenizer: TokenizerBundle) -> None:
        """Publish a worker's card; its heartbeats renew it, and write it again should Redis lose it.

        Workers of one model may have got it from different places: the card keeps them all.
        """
        known = await self.card(card.name)
        if known is not None and known.base_sha256 == card.base_sha256:
            sources = tuple(dict.fromkeys((*card.sources, *known.sources)))[:SOURCES_KEPT]
            card = msgspec.structs.replace(card, sources=sources)
        name = keys.tokenizer(card.tokenizer_sha256)
        async with self._redis.pipeline() as pipe:
            pipe.set(keys.model_card(card.name), msgspec.json.encode(card), ex=keys.REGISTRY_TTL_S)
            pipe.zadd(keys.models(), {card.name: time.time_ns() // 1_000_000}, nx=True)  # it may have no worker yet
            pipe.expire(keys.models(), keys.REGISTRY_TTL_S)
            pipe.expire(name, keys.REGISTRY_TTL_S)
            *_, is_there = await pipe.execute()
        if not is_there:  # megabytes, which every worker of a ring would send
            await self._redis.set(name, msgspec.json.encode(tokenizer), ex=keys.REGISTRY_TTL_S)
        self._registered[card.name] = (card, tokenizer)

    async def admit(self, card: ModelCard, status: Callable[[], WorkerStatus]) -> None:
        """Begin the heartbeats of a worker, before it registers its model.

        SetupError while workers of the same name compute with something else. Those that have died without a word are
        waited for, and so, for a while, are those that start with us: one that looked before our first heartbeat is
        about to be ready, though it began after us. Of several that wait for one another, the first one may stay.

        Nobody reads the heartbeats of a large ring in which all have the same: of n that start at once each would read
        n. In a small one they are read, since a worker of an earlier version says what it has nowhere else.
        """
        began = time.monotonic()
        while True:
            ours = status()
            if not await self.heartbeat(ours) and await self._redis.zcard(keys.workers(card.name)) > FEW:
                return
            others = [other for other in await self.workers(card.name) if _has_others(other, ours)]
            first = [other for other in others if _was_first(other, ours)]
            waited_s = time.monotonic() - began
            if not others or (not first and waited_s > READY_WITHIN_S):
                return
            if first and waited_s > PATIENCE_S:
                await self.remove(card.name, ours.id)
                raise SetupError(_differs(ours, first))
            await asyncio.sleep(LOOK_AGAIN_S)

    async def heartbeat(self, status: WorkerStatus) -> bool:
        """Write a worker's heartbeat; returns whether a worker of its model computes with something else, or has done
        so within WORKER_TTL_S."""
        key = keys.worker(status.model, status.id)
        fields = msgspec.structs.asdict(status)  # defaults, too: they replace the values of an earlier heartbeat
        fields["adapters"] = msgspec.json.encode(status.adapters)
        fields["extra"] = msgspec.json.encode(status.extra)
        fields["versions"] = msgspec.json.encode(status.versions)
        fields["ranks"] = msgspec.json.encode(status.ranks)
        fields["machine"] = msgspec.json.encode(status.machine)
        async with self._redis.pipeline() as pipe:
            pipe.hset(key, mapping=fields)
            pipe.expire(key, keys.WORKER_TTL_S)
            for index, member in ((keys.workers(status.model), status.id), (keys.models(), status.model)):
                pipe.zadd(index, {member: status.heartbeat_ms})
                pipe.expire(index, keys.REGISTRY_TTL_S)
            ours = self._registered.get(status.model)
            kept = [keys.model_card(status.model)]
            kept += [keys.tokenizer(ours[0].tokenizer_sha256)] if ours else []
            for name in kept:
                pipe.expire(name, keys.REGISTRY_TTL_S)
            answers = await pipe.execute()
        if ours and not all(answers[-len(kept) :]):
            await self.register_model(*ours)
        if not status.weights:
            return False
        # After the heartbeat: a process that learns of our weights finds us.
        return bool(await _WEIGHTS(self._redis, [keys.weights(status.model)], [status.weights, keys.WORKER_TTL_S]))

    async def remove(self, model: str, worker_id: str) -> None:
        """Remove a worker that leaves in an orderly way."""
        async with self._redis.pipeline() as pipe:
            pipe.delete(keys.worker(model, worker_id))
            pipe.zrem(keys.workers(model), worker_id)
            await pipe.execute()

    async def models(self) -> list[ModelCard]:
        """The cards of all known models, whether a worker lives or not."""
        cards = [await self.card(name) for name in await members(self._redis, keys.models())]
        return [card for card in cards if card is not None]

    async def card(self, model: str) -> ModelCard | None:
        """A model's card; None when no worker has registered it."""
        data = await self._redis.get(keys.model_card(model))
        try:
            return None if data is None else msgspec.json.decode(data, type=ModelCard)
        except (msgspec.DecodeError, ValueError) as error:
            log.warning("registry.unreadable_card", model=model, error=str(error))
            return None

    async def names(self) -> list[str]:
        """The names of all known models."""
        return sorted(await members(self._redis, keys.models()))

    async def live_models(self) -> set[str]:
        """Models that at least one live worker serves."""
        return {name for name in await members(self._redis, keys.models()) if await self.workers(name)}

    async def known(self, model: str) -> list[str]:
        """Ids of a model's live workers, and of workers that ended without `remove` within the last hour."""
        return await members(self._redis, keys.workers(model))

    async def live(self, model: str) -> list[str]:
        """Ids of a model's live workers: what a worker asks with every heartbeat, so without their statuses.

        In a large ring they may be two seconds old.
        """
        if await self._redis.zcard(keys.workers(model)) < MANY:
            return await self._read_live(model)
        return await self._live.at(model, lambda: self._read_live(model))

    async def _read_live(self, model: str) -> list[str]:
        ids = await self.known(model)
        beats = await ask_all(self._redis, [("EXISTS", keys.worker(model, worker_id)) for worker_id in ids])
        return sorted(worker_id for worker_id, lives in zip(ids, beats, strict=True) if lives)

    async def workers(self, model: str) -> list[WorkerStatus]:
        """A model's live workers, by id; prunes those gone for more than an hour.

        Where looks are shared, those of a large ring may be two seconds old.
        """
        if not self._shares or await self._redis.zcard(keys.workers(model)) < MANY:
            return await self._read_workers(model)
        return await self._statuses.at(model, lambda: self._read_workers(model))

    async def _read_workers(self, model: str) -> list[WorkerStatus]:
        ids = await self.known(model)
        statuses: list[WorkerStatus] = []
        beat = 0
        for at in range(0, len(ids), AT_ONCE):  # the event loop has other things to do in between
            part = ids[at : at + AT_ONCE]
            beats = await ask_all(self._redis, [("HGETALL", keys.worker(model, worker_id)) for worker_id in part])
            statuses += [status for fields in beats if fields and (status := _status(fields)) is not None]
            beat += sum(map(bool, beats))
        if beat < len(ids):
            now_ms = await server_time_ms(self._redis, keys.workers(model))
            await self._redis.zremrangebyscore(keys.workers(model), 0, now_ms - 3_600_000)
        return sorted(statuses, key=lambda status: status.id)

    async def tokenizer(self, sha256: str) -> TokenizerBundle:
        """A tokenizer by its hash; NotFoundError when it has expired."""
        data = await self._redis.get(keys.tokenizer(sha256))
        if data is None:
            raise NotFoundError(f"tokenizer {sha256[:12]} is not in the registry; start a worker that serves its model")
        return msgspec.json.decode(data, type=TokenizerBundle)


class DifferingWeights:
    """Logs once that workers of a model have different weights all the same.

    Admission cannot keep apart those that a Redis without its data, or the former replica of one, did not know of.
    """

    def __init__(self, worker_id: str, *, allowed: bool) -> None:
        self._worker_id, self._is_reported = worker_id, allowed
        self._since: float | None = None

    def heard(self, there_are: bool, now: float) -> None:
        """Record whether a heartbeat found other weights, at a time of a monotonic clock."""
        if not there_are:
            self._since = None
            return
        self._since = now if self._since is None else self._since
        if not self._is_reported and now - self._since >= REPORT_AFTER_S:
            self._is_reported = True
            what = "other workers of this model have other weights, or keep trying to join with them"
            log.warning("worker.weights_differ", worker=self._worker_id, reason=what)


def _has_others(other: WorkerStatus, ours: WorkerStatus) -> bool:
    """True if another worker serves other weights under our model's name."""
    return bool(other.id != ours.id and other.weights and other.weights != ours.weights)


def _was_first(other: WorkerStatus, ours: WorkerStatus) -> bool:
    return other.state != "starting" or (other.started_ms, other.id) < (ours.started_ms, ours.id)


def _differs(ours: WorkerStatus, others: list[WorkerStatus]) -> str:
    named = "; ".join(f"worker {other.id!r} on {other.host} has {other.weights}" for other in others[:3])
    return (
        f"model {ours.model!r} is being served with something else: {named}; this worker has {ours.weights}. "
        "Requests move between the workers of a model, so their answers would differ. Load the same (--model, "
        "--dtype, --kv-bits, --kv-group-size), serve this one as another (--served-model-name NAME), or say that you "
        "mean it: --allow-other-weights"
    )


def _status(fields: dict[bytes, bytes]) -> WorkerStatus | None:
    """A heartbeat; None, and a line in our log, when it cannot be read."""
    try:
        plain: dict[str, object] = {name.decode(): value.decode() for name, value in fields.items()}
        for name, empty in (
            ("adapters", "{}"),
            ("extra", "{}"),
            ("versions", "[]"),
            ("ranks", "[]"),
            ("machine", "{}"),
        ):
            plain[name] = msgspec.json.decode(str(plain.get(name, empty)))
        return msgspec.convert(plain, WorkerStatus, strict=False)
    except (msgspec.DecodeError, ValueError) as error:
        log.warning("registry.unreadable_heartbeat", worker=fields.get(b"id"), error=str(error))
        return None
