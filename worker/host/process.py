"""The host: looks at the ring's models and their demand, decides what this machine holds, and starts and ends workers.

It holds no model and no MLX. Requests never come here: they wait in their model's queue, where the host sees them.

Invariants. A model is loaded only under its lease. What a heartbeat says is what this process knows to be so: a model
is "ready" when its worker has joined the ring, and its memory is free when the worker's process has ended. A model
stays in `_held` from the lease until then.
"""

import asyncio
import contextlib
import os
import socket
import time
import uuid

import msgspec
import structlog
from redis.exceptions import RedisError

from shared.catalogue import (
    DRAFT,
    EMPTY,
    CatalogueEntry,
    HostStatus,
    ModelOrder,
    PastModel,
    RingModels,
)
from shared.errors import ConflictError, InvalidRequestError, SetupError
from shared.process.loops import begin, cancel, until_taken
from shared.process.model_aliases import short_name
from shared.process.worker_settings import LINGER_S, WorkerSettings
from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.processes.catalogue import CatalogueStore
from shared.redis.processes.worker_registry import WorkerRegistry
from worker.host.held import Held
from worker.host.memory import limit_of, machine_room
from worker.host.offers import Offers
from worker.host.placement import LOADING, Load, PlacementRules, Unload, decide
from worker.host.weights.exchange import WeightExchange
from worker.host.weights.files import WeightsRequest
from worker.host.workers import WorkerChild
from worker.rows import now_ms

log = structlog.get_logger()

LOOK_S = 0.2  # between two looks at the demand where nobody calls for one
REST = 4.0  # times what a look takes, before the next one
SPARE_AFTER_S = 3.0  # of the last load: its first token and its warm-up need the processor
BEAT_S = 1.0
REGISTER_EVERY_S = 3600.0  # cards and tokenizers, which Redis keeps for a week
STEADY_S = 60.0  # a worker that ends of itself sooner than that after it was ready has died early
LOOKS = 3  # at the files of a model, by processes that end amid them
PATIENCE_S = 10.0  # beyond a worker's grace, until it is killed


class HostProcess:
    """The host of one machine, which starts a worker for each model that it holds."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._machine = socket.gethostname().split(".")[0]
        self.id = settings.worker_id or f"{self._machine}-{uuid.uuid4().hex[:6]}"
        self._rules = PlacementRules(batch_turn_s=settings.batch_turn_s, idle_s=settings.model_idle_s)
        self._held: dict[str, Held] = {}
        self._past: dict[str, PastModel] = {}
        self._died_early: set[str] = set()  # models whose worker did so last time: once more, and the load has failed
        self._weights = WeightExchange(settings, self.id, self._given_source)
        self._offers = Offers(settings, self._weights)
        self._models = EMPTY  # at the last look
        self._spare: WorkerChild | None = None
        self._room_bytes = 0
        self._draining = False
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()  # a heartbeat is due
        self._asked = asyncio.Event()  # a look is due
        self._telling = asyncio.Lock()  # between Redis and what we know of it nothing is half done

    def stop(self) -> None:
        """Begin to end; safe in a signal handler of the loop."""
        self._stop.set()

    async def run(self) -> int:
        """Serve until stopped; the exit code. SetupError for a given model that cannot be loaded at all."""
        self._redis = connect(self._settings.redis)
        self._calls = connect(self._settings.redis, blocking=True)
        self._store, self._registry = CatalogueStore(self._redis), WorkerRegistry(self._redis)
        loops: list[asyncio.Task[None]] = []
        try:
            self._weights.open()
            await self._offers.look(self._offers.given)
            await self._describe([each for each in self._offers.given if self._offers.files(each.name).place])
            for looked in self._offers.looked:
                if looked.why:
                    raise SetupError(f"--model {looked.entry.source}: {looked.why}")
            first = asyncio.create_task(until_taken("host", self._join))
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait({first, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if first.done():
                first.result()
                log.info("host.ready", host=self.id, models=sorted(each.entry.name for each in self._offers.looked))
            loops = begin(
                "host",
                beat=self._beat_forever,
                look=self._look_forever,
                describe=self._look_at_new,
                listen=self._listen,
                spare=self._tend_spare,
                register=self._register,
            )
            await stopped
            await cancel([first])
        finally:
            self._draining = True
            self._changed.set()
            await self._end_all()
            await cancel(loops)
            if self._spare is not None:
                await self._spare.kill()
            await self._weights.close()
            with contextlib.suppress(RedisError, OSError):
                async with asyncio.timeout(1):
                    await self._store.leave(self.id)
            await self._redis.aclose()
            await self._calls.aclose()
        log.info("host.stopped", host=self.id)
        return 0

    # -- what it offers

    async def _join(self) -> None:
        for entry in self._offers.given:
            await self._offer(entry, adds=True)
        await self._beat()
        models = await self._store.read()
        for first in self._offers.given[:1]:  # as a worker of one model has it from the start
            if not models.holding(first.name) and not any(order.model == first.name for order in models.orders):
                await self._store.order("load", first.name)

    async def _offer(self, entry: CatalogueEntry, *, adds: bool = False) -> None:
        """Write what was found in the files of a model that this host has, its card and its tokenizer; `adds`: also
        where the catalogue has no such model."""
        described = self._offers.known(entry.name)
        if described is not None:
            entry = msgspec.structs.replace(
                entry,
                size_bytes=described.weight_bytes,
                context=described.card.context_length,
                family=described.family,
                sha256=described.card.base_sha256,
            )
            await self._registry.register_model(described.card, described.tokenizer)  # first: who finds it may ask it
        try:
            await self._store.offer(entry, adds=adds)
        except (ConflictError, InvalidRequestError) as error:
            raise SetupError(f"--model {entry.source}: {error}") from error

    async def _register(self) -> None:
        while True:
            await asyncio.sleep(REGISTER_EVERY_S)
            for looked in self._offers.looked:
                await self._offer(looked.entry)

    async def _describe(self, entries: list[CatalogueEntry], *, offers: bool = False) -> None:
        """Look at the files of models that are here, and offer each to the ring; what the hub has is looked at when it
        is fetched."""
        if not entries:
            return
        spare = await self._take_spare()
        try:
            for entry in entries:
                for _ in range(LOOKS):
                    answer = await spare.describe(self._settings_of(entry))
                    if spare.runs:
                        break
                    spare = await WorkerChild.start()  # that one was killed, or the model ends any
                self._offers.note(entry, answer.described, answer.why)
                if offers and answer.described is not None:
                    await self._offer(entry)
        finally:
            await self._give_back(spare)

    async def _take_spare(self) -> WorkerChild:
        """A spare, which is nobody else's from now on."""
        spare, self._spare = self._spare, None
        return spare if spare is not None and spare.runs else await WorkerChild.start()

    async def _give_back(self, spare: WorkerChild) -> None:
        if spare.runs and self._spare is None and self._settings.spare_worker and not self._draining:
            self._spare = spare
        else:
            await spare.kill()

    async def _look_at_new(self) -> None:
        """Describe what the catalogue has got since the last look, or has otherwise than before.

        On its own, since the hash of a large model takes as long as its disk needs, and others are to be loaded then.
        """
        while True:
            models = self._models
            if models.hosts:
                await self._offers.look([*models.entries.values(), *self._offers.given])
                await self._describe(self._offers.new(models, self._held), offers=True)
                self._offers.forget_all_but(self._models.entries)
            await asyncio.sleep(LOOK_S)

    def _given_source(self, ask: WeightsRequest) -> str:
        """Where the files of a model are that another host asks for; "" where they are not ours, or others."""
        known = self._offers.known(ask.model)
        return "" if known is None or known.card.base_sha256 != ask.sha256 else self._offers.files(ask.model).place

    # -- what it holds

    async def _look_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._asked.wait()
            self._asked.clear()
            began = time.monotonic()
            async with self._telling:
                models = await self._store.read()
                # A Redis without our heartbeat has lost the catalogue, too, until the next one.
                is_whole = any(host.id == self.id for host in models.hosts)
                if is_whole and not self._draining:
                    await self._follow(models)
            if is_whole:
                self._models = models
            await asyncio.sleep(min(LOOK_S, REST * (time.monotonic() - began)))  # however often we are called

    def _note_change(self) -> None:
        """Have the ring know at once, and look what is possible now."""
        self._changed.set()
        self._asked.set()

    async def _listen(self) -> None:
        """Look at once where something is asked for that no worker has."""
        async with self._calls.pubsub() as channel:
            await channel.subscribe(keys.control_channel(keys.HOSTS))
            async for _ in channel.listen():  # the first message is the subscription's own
                self._asked.set()

    async def _follow(self, models: RingModels) -> None:
        """Do what is this host's part of the plan."""
        hosts = [host for host in models.hosts if host.id != self.id] + [self._status(models)]
        models = msgspec.structs.replace(models, hosts=tuple(sorted(hosts, key=lambda host: host.id)))
        models = await self._settle_orders(models)  # first: one whose load has failed is not carried out again
        demand = await self._store.demand(models)
        for action in decide(models, demand, self.id, self._rules):
            if isinstance(action, Load):
                await self._load(action, models)
            else:
                self._unload(action)
        for name, asked in demand.items():
            held = self._held.get(name)
            is_only = all(host.id == self.id for host, each in models.holding(name) if each.state == "ready")
            if held is not None and is_only and (any(asked.waiting.values()) or any(asked.running.values())):
                held.used_ms = now_ms()  # of several copies, each one's worker says which is in use: `_note_uses`
        for held in self._held.values():
            if held.name not in models.entries:
                held.give_up("it is no longer in the catalogue")
            elif any(each.kind == "unload" for each in _orders(models, held.name, self.id)):
                held.give_up("as ordered")

    async def _settle_orders(self, models: RingModels) -> RingModels:
        """Take orders off the list that have been carried out, or cannot be; the models without these."""
        left = []
        for order in models.orders:
            if order.host not in ("", self.id):
                left.append(order)
                continue
            held = self._held.get(order.model)
            if order.kind == "load":
                done = held is not None and held.state == "failed" and order in held.orders
                done |= any(each.state == "ready" for host, each in models.holding(order.model) if not order.host)
                done |= held is not None and held.state == "ready"
            else:
                there = [each for host, each in models.holding(order.model) if order.host in ("", host.id)]
                done = held is None or held.state == "failed"
                done &= all(each.state == "failed" for each in there)
            if done:
                await self._store.fulfil(order)
            else:
                left.append(order)
        return msgspec.structs.replace(models, orders=tuple(left))

    async def _load(self, action: Load, models: RingModels) -> None:
        name, before = action.model, self._held.get(action.model)
        if before is not None and before.state != "failed":
            return
        if not await self._store.take_load(name, self.id, models.loads.get(name, 0)):
            return
        entry, needs = models.entries[name], self._offers.of(models)[0]
        expected = self._past.get(name, PastModel()).load_s
        need, now = needs.get(name, 0) or entry.size_bytes, now_ms()
        held = Held(name, need, entry.sha256, expected, since_ms=now, used_ms=now)
        held.orders = _orders(models, name, self.id)
        log.info("host.loads", model=name, why=action.why, unloads=list(action.evict))
        leaving = [self._unload(Unload(each, f"its memory is needed for {name}")) for each in action.evict]
        self._held[name] = held
        held.task = asyncio.create_task(self._live(held, entry, needs, [task for task in leaving if task]))
        self._note_change()

    def _unload(self, action: Unload) -> "asyncio.Task[None] | None":
        held = self._held.get(action.model)
        if held is None or held.state != "ready":
            return None if held is None else held.task
        log.info("host.unloads", model=held.name, why=action.why)
        held.become("unloading", action.why)
        assert held.child is not None
        self._note_change()
        stopping = asyncio.create_task(held.child.stop(self._patience_s))
        stopping.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        return held.task

    @property
    def _patience_s(self) -> float:
        """Time that a worker may take to end."""
        return self._settings.drain_grace_s + PATIENCE_S + (LINGER_S if self._settings.kv_transfer else 0)

    async def _live(
        self, held: Held, entry: CatalogueEntry, needs: dict[str, int], leaving: "list[asyncio.Task[None]]"
    ) -> None:
        """One model's time on this host, from its load to the end of its worker."""
        held.starting = asyncio.create_task(self._start(held, entry, needs, leaving))
        try:
            why = await held.starting
        except asyncio.CancelledError:
            if not held.is_given_up:
                held.starting.cancel()
                raise
            why = "its load is given up"
        except Exception as error:
            log.exception("host.load_failed", model=held.name)
            why = f"{type(error).__name__}: {error}"
        if why:
            if held.child is not None:
                await held.child.kill()
            if held.is_given_up:
                self._held.pop(held.name, None)
                await self._end_load(held)
                self._note_change()
                return
            log.error("host.cannot_load", model=held.name, reason=why)
            held.become("failed", why)
            await self._end_load(held)
            return
        held.become("ready")
        ready_ms = held.since_ms
        self._past[held.name] = PastModel(held.load_s)
        log.info("host.loaded", model=held.name, worker=held.worker, load_s=round(held.load_s, 2))
        await self._end_load(held)
        assert held.child is not None
        code = await held.child.ended()
        self._past[held.name] = PastModel(held.load_s, now_ms())
        has_died = held.state == "ready" and not self._draining
        if has_died:
            log.error("host.worker_died", model=held.name, exit_code=code)
        if now_ms() - ready_ms >= 1000 * STEADY_S:
            self._died_early.discard(held.name)
        elif has_died and held.name in self._died_early:
            held.become("failed", f"its worker has ended with exit code {code}")
            self._note_change()
            return
        elif has_died:
            self._died_early.add(held.name)
        self._held.pop(held.name, None)
        self._note_change()

    async def _start(
        self, held: Held, entry: CatalogueEntry, needs: dict[str, int], leaving: "list[asyncio.Task[None]]"
    ) -> str:
        """Fetch and load a model, once what it takes the memory of has gone; why it cannot be, "" if it is ready."""
        if leaving:
            await asyncio.wait(leaving)
        began = time.monotonic()  # a drain is no part of what a load takes
        known = self._offers.current(held.name) if await self._offers.find(entry) else None
        await asyncio.to_thread(self._weights.note_use, entry.sha256)
        if known is None or (self._spare is not None and self._spare.runs):
            held.child = await self._take_spare()
        if known is None:
            assert held.child is not None
            if why := await self._fetch(held, entry, held.child):
                return why
            needs, began = {**needs, held.name: held.need_bytes}, time.monotonic()
        held.worker = f"{self.id}-{short_name(held.name)}-{uuid.uuid4().hex[:4]}"
        await self._measure_room()
        limit = limit_of(held.name, needs, self._room_bytes, self._settings.max_loaded_models)
        settings = self._settings_of(entry) | {
            "PARALLM_WORKER_ID": held.worker,
            "PARALLM_MEMORY_LIMIT": str(limit / 1e9),
        }
        if held.child is None:
            held.child = await WorkerChild.start(settings)
        else:
            await held.child.serve(settings)
        if self._draining:
            return "its host ends"
        why = await held.child.started(held.advance)
        held.load_s = time.monotonic() - began
        return why

    async def _fetch(self, held: Held, entry: CatalogueEntry, spare: WorkerChild) -> str:
        """Get a model from the hub, unless its files are here, and look at it; why that cannot be."""
        if not self._offers.files(entry.name).place:
            held.become("downloading")
            self._note_change()
        models = await self._store.read()
        if not await self._offers.find(entry) and self._weights.givers(entry, models):
            why = await self._weights.take(entry, models, held.advance, self._hashes_in_use())
            if not await self._offers.find(entry) and not self._offers.files(entry.name).hub:
                return why
        answer = await spare.describe(self._settings_of(entry), held.advance)
        held.become("loading")
        if answer.described is None:
            return answer.why
        self._offers.note(entry, answer.described)
        if why := self._offers.refusal(entry):
            self._weights.forget(entry.sha256)
            return why
        held.need_bytes = answer.described.need_bytes
        await self._offer(entry)
        taken = sum(each.need_bytes for each in self._held.values() if each.state != "failed")
        if self._room_bytes and taken > self._room_bytes:
            return (
                f"it is here now, and needs {held.need_bytes / 1e9:.1f} GB, of which "
                f"{max(0, self._room_bytes - taken + held.need_bytes) / 1e9:.1f} GB are free"
            )
        return ""

    def _hashes_in_use(self) -> set[str]:
        """Hashes of the models that this host holds or gets."""
        held = [name for name, each in self._held.items() if each.state != "failed"]
        known = (self._offers.known(name) for name in held)
        return {self._held[name].sha256 for name in held} | {each.card.base_sha256 for each in known if each}

    async def _end_load(self, held: Held) -> None:
        """Give the lease back, after a heartbeat that shows what has become of the load, and after its orders: the
        worker may die before anybody looks."""

        async def done() -> None:
            await self._beat()
            async with self._telling:
                for order in () if held.is_given_up else held.orders:
                    await self._store.fulfil(order)
                await self._store.end_load(held.name, self.id)

        await until_taken("host", done)

    def _settings_of(self, entry: CatalogueEntry) -> dict[str, str]:
        """A worker's settings for one model, as variables."""
        host = {"models": [], "from_catalogue": False, "max_loaded_models": 0, "dry_run": False, "drain_batch": False}
        own = {"model": self._offers.files(entry.name).place or entry.source, "served_model_name": entry.name}
        variables = self._settings.model_copy(update=host | own).environment()
        given = dict(entry.options)
        if draft := given.pop(DRAFT, ""):
            given = {"spec-decode": "auto", **given, "draft-model-path": self._offers.files(draft).source}
        options = {f"PARALLM_{flag.replace('-', '_').upper()}": value for flag, value in given.items()}
        return variables | options

    async def _tend_spare(self) -> None:
        """Have a spare, but not while something is loading: it would take that one's processor."""
        calm = time.monotonic()
        while self._settings.spare_worker:
            await asyncio.sleep(LOOK_S)
            if any(held.state in LOADING for held in self._held.values()):
                calm = time.monotonic() + SPARE_AFTER_S
            if not self._draining and time.monotonic() >= calm and (self._spare is None or not self._spare.runs):
                self._spare = await WorkerChild.start()

    async def _end_all(self) -> None:
        """End all workers, each in order, at the same time."""
        there = list(self._held.values())  # each is taken out when its worker has ended
        lives = [held.task for held in there if held.task is not None]
        for held in there:
            self._unload(Unload(held.name, "its host ends"))
            held.give_up("its host ends")
        if lives:
            await asyncio.wait(lives, timeout=self._patience_s + PATIENCE_S)
        for held in there:
            if held.child is not None and held.child.runs:
                await held.child.kill()
        await cancel(lives)

    # -- heartbeats

    async def _beat_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._changed.wait()
            self._changed.clear()
            await self._note_uses()
            await self._beat()

    async def _beat(self) -> None:
        async with self._telling:
            models = await self._store.read()
            await self._measure_room()
            await self._weights.tend(self._redis)
            beat = await self._store.beat(self._status(models))
            if not beat.has_catalogue:
                for looked in self._offers.looked:
                    await self._offer(looked.entry, adds=True)
        for name in beat.lost:
            held = self._held.get(name)
            if held is not None:
                held.give_up("another host has the lease")

    async def _measure_room(self) -> None:
        pids = [held.child.pid for held in self._held.values() if held.child is not None and held.child.runs]
        device = self._offers.device
        limit = self._settings.memory_limit_bytes
        self._room_bytes = await asyncio.to_thread(machine_room, device, limit, pids)

    def _status(self, models: RingModels) -> HostStatus:
        taken = sum(held.need_bytes for held in self._held.values() if held.state != "failed")
        offers, refuses, unseen = self._offers.of(models)
        return HostStatus(
            id=self.id,
            host=self._machine,
            pid=os.getpid(),
            heartbeat_ms=now_ms(),
            memory_bytes=self._room_bytes,
            free_bytes=self._room_bytes - taken,
            most_models=self._settings.max_loaded_models,
            offers=offers,
            refuses=refuses,
            unseen=tuple(unseen),
            held=tuple(held.status for held in self._held.values()),
            draining=self._draining,
            past=self._past,
            weights_address=self._weights.address,
        )

    async def _note_uses(self) -> None:
        """When each model was last used: a short request comes and goes between two looks."""
        for held in list(self._held.values()):
            if held.state != "ready":
                continue
            for status in await self._registry.workers(held.name):
                if status.id == held.worker and (status.steps != held.steps or status.rows):
                    held.steps, held.used_ms = status.steps, now_ms()


def _orders(models: RingModels, name: str, host: str) -> list[ModelOrder]:
    """Orders of a model that are a host's to carry out."""
    return [order for order in models.orders if order.model == name and order.host in ("", host)]
