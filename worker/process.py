"""The worker's asyncio side: claim, renew, publish, cancel, heartbeat, drain. The engine thread does the rest.

Data runs one way round: queue -> `_claim_forever` -> engine -> `TokenPublisher` -> Redis. The loops share one table
of rows (rows.py), touched only on the event loop.

Invariants. A sequence sits in the table from claim to commit, and its lease is renewed all that time. What the
engine says of a sequence that is not in the table is dropped. When a lease is lost the row is freed and
nothing more is written for it.
"""

import asyncio
import contextlib
import socket
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

import structlog
from redis.exceptions import RedisError

from mlx_model.config import SlotConfig
from ranks.placement import Placement
from shared.errors import EngineError
from shared.frames import TokenEvent
from shared.process.garbage import leave_out_what_is_loaded
from shared.process.loops import begin, cancel, until_taken
from shared.process.start_reports import report
from shared.process.worker_settings import WorkerSettings
from shared.ranks import RankStatus
from shared.redis.connection.client import connect
from shared.redis.processes.metric_store import MetricWriter
from shared.redis.processes.pause import PauseSwitch
from shared.redis.processes.worker_registry import DifferingWeights, WorkerRegistry, WorkerState, WorkerStatus
from shared.redis.queue.affinity import WarmNotes
from shared.redis.queue.sequence_queue import ClaimPlan, SequenceQueue
from shared.redis.tokens.log import read_tokens
from shared.redis.tokens.writer import FrameWriter
from shared.sequences import Claim, ModelCard
from shared.telemetry.metrics import Tally
from worker.adapters.cache import DiskCache
from worker.adapters.sync import AdapterSync
from worker.cache_resets import CacheResets
from worker.claim_plan import NOTHING, claim_plan
from worker.claims import LAST_WORDS_S, Preparing, Returns
from worker.control import ControlChannel
from worker.court import CourtDuty
from worker.downloads import hub_download, report_download
from worker.drain import Farewell
from worker.engine.batch.adapters import AdapterStats
from worker.engine.messages import EndReason, RowRequest, StepOutput, engine_config
from worker.engine.orders import Cancel
from worker.engine.thread import EngineThread
from worker.engine_watch import EngineWatch
from worker.group.engine_lead import EngineLead
from worker.group.opening import ended, joined, started
from worker.guest import Guest, Lodging, Workplace
from worker.machine_watch import MachineReaders, MachineWatch
from worker.pause import Pause
from worker.peers.exchange import KvExchange
from worker.pictures import SequencePictures
from worker.publisher import TokenPublisher
from worker.reports import Identity, WorkerCounts, worker_status
from worker.ring_memory import ring_memory
from worker.rows import ClaimedRow, ClaimedRows, now_ms

log = structlog.get_logger()
T = TypeVar("T")

HEARTBEAT_S = 2.0
WAIT_S = 1.0  # longest block of an idle worker; stealing looks around this often
LOOK_FOR_ORPHANS_EVERY = 5  # heartbeats
REFRESH_MODEL_EVERY = 150  # heartbeats between two refreshes of card and tokenizer
COMPILING_S = 60  # for a piece of the engine's warm-up to end


class WorkerProcess:
    """One worker: an engine thread and the loops that connect it to the ring."""

    def __init__(
        self,
        settings: WorkerSettings,
        guest: Guest | None = None,
        placed: Placement | None = None,
        readers: MachineReaders = MachineReaders(),  # noqa: B008  # frozen
    ) -> None:
        """`placed`: as rank 0 of a group, which holds the model together with us."""
        self._settings = settings
        self._readers = readers
        self._placed = placed
        self._lodging = Lodging(guest, settings.end_with_guest)
        self.id = settings.worker_id or f"{socket.gethostname().split('.')[0]}-{uuid.uuid4().hex[:6]}"
        self._lease_s = settings.lease_ms / 1000
        self.rows = ClaimedRows()
        self._state: WorkerState = "starting"
        self._started_ms = now_ms()
        self._others: list[str] = []
        self._differing = DifferingWeights(self.id, allowed=settings.allow_other_weights)
        self._death: BaseException | None = None
        self.stalled = False  # the engine's thread is alive and stuck: this process cannot end in order
        self._stop = asyncio.Event()
        self._rate = (time.monotonic(), 0)

    async def run(self) -> int:
        """Serve until stopped; the exit code: 0 after a drain, 1 when the engine has died or is stuck, 2 when it was
        to end with its guest, and the guest gave up."""
        self._loop = asyncio.get_running_loop()
        s = self._settings
        adapters = SlotConfig(s.adapter_slots, s.adapter_rank, s.adapter_dtype)
        config, placed = engine_config(s, self._lodging.learner_rank), self._placed
        self._group = group = None if placed is None else EngineLead(s, placed, self._on_lost, config, adapters)
        self._engine = EngineThread(config, self._on_step, self._on_death, adapters, self._on_adapters, group)
        self._watch = EngineWatch(self._engine, s.engine_stall_s, self._on_stall)
        download = hub_download(s.model)
        reporting = begin("worker", download=lambda: report_download(download, s.redis, self.id)) if download else []
        try:
            loaded = await started(self._engine, group, self._stop)
        finally:
            await cancel(reporting)
        if loaded is None:
            return 0
        place = Workplace(self._engine, loaded, group)
        self._card, self._tokenizer = loaded.card, loaded.tokenizer
        self._redis = connect(self._settings.redis)
        self._control = connect(self._settings.redis, blocking=True)
        try:
            leave_out_what_is_loaded()
            self._open(loaded.card)
            if await joined(until_taken("worker", self._join), group, self._stop):
                self._lodging.open(place, self._stop)
                await self._serve()
        finally:
            gone = self._registry.remove(self._card.name, self.id)
            for last_word in (gone, self._peers.close(), self._count(), self._adapters.close()):
                with contextlib.suppress(RedisError, OSError):  # TimeoutError is an OSError
                    async with asyncio.timeout(1):
                        await last_word
            self._preparing.close()
            patience_s = COMPILING_S if self._engine.stats().warms_up else 10
            if group is not None and self._death is None:  # no rank may leave while the others compute a turn with it
                await asyncio.to_thread(self._engine.stop, patience_s)
            await ended(group)
            await asyncio.to_thread(self._engine.stop, 0 if self.stalled else patience_s)
            await self._redis.aclose()
            await self._control.aclose()
        log.info("worker.stopped", worker=self.id)
        return 1 if self._death else self._lodging.exit_code

    def stop(self) -> None:
        """Begin to drain; safe in a signal handler of the loop."""
        self._stop.set()

    def _open(self, card: ModelCard) -> None:
        self._queue = SequenceQueue(self._redis, card.name, lease_ms=self._settings.lease_ms)
        self._registry = WorkerRegistry(self._redis)
        tally = Tally()
        self._counts = WorkerCounts(tally, card.name)
        self._metrics = MetricWriter(self._redis, tally, "worker", self.id)
        self._notes = WarmNotes(self._redis, card.name, self.id)
        self._adapters = AdapterSync(
            self._redis,
            self._control,
            self._engine,
            DiskCache(self._settings.adapter_cache_dir, int(self._settings.adapter_cache_gb * 1e9)),
            worker_id=self.id,
            base_sha256=card.base_sha256,
            slots=self._settings.adapter_slots,
            everywhere=None if self._group is None else self._group.bring,
        )
        self._memory = ring_memory(self._settings, self._redis, self._engine, card)
        self._publisher = TokenPublisher(
            FrameWriter(self._redis, card.name, self.id, replay_share=self._settings.replay_share),
            self.rows,
            self.id,
            log_every_tokens=self._settings.log_every_tokens,
            verify=self._renew,
            stale_after_s=0.8 * self._lease_s,
            counts=self._counts.sequences,
            ended=self._memory.ended,
        )
        self._peers = KvExchange(self._settings, self._redis, self._engine, card, self.id)
        self._peers.open(tally)
        self._returns = Returns(self._queue, self.id, self.rows, self._publisher, self._engine)
        back, ranks = self._counts.memory_handed_back.add, self._shown_ranks
        self._machine = MachineWatch(self._settings, self._engine, self._returns, self.rows, back, ranks, self._readers)
        self._pause = Pause(PauseSwitch(self._redis), self._engine, self._returns, self.rows, on_change=self._beat)
        send, take, pictures = self._engine.send, self._publisher.take, SequencePictures(self._redis, card.vision)
        self._preparing = Preparing(self._adapters, self.rows, send, self._submitted, take, self._peers, pictures)
        drains = self.stop if self._settings.on_wrong_tokens == "drain" else lambda: None
        idle, others, serves = lambda: not len(self.rows), lambda: self._others, bool(self._settings.replay_share)
        heard = self._counts.heard
        self._court = CourtDuty(self._redis, card, self.id, idle, others, heard, drains, serves=serves)
        self._cache_resets = CacheResets(self._redis, self._engine, self.id)
        obey = (self._cancel, self._publisher.flush_log, self._pause.poke, self._cache_resets.take)
        self._orders = ControlChannel(self._redis, self._control, card.name, self.id, self.rows, *obey)

    async def _join(self) -> None:
        """Have the ring know us."""
        if not self._settings.allow_other_weights:
            await self._registry.admit(self._card, self._status)
        await self._registry.register_model(self._card, self._tokenizer)
        self._state = "ready"
        await self._pause.look()
        await self._beat()
        report(worker=self.id)
        log.info("worker.ready", worker=self.id, model=self._card.name, rows=self._settings.max_batch_size)

    async def _serve(self) -> None:
        claiming = begin("worker", claim=self._claim_forever, reap=self._reap_forever, **self._court.loops)
        tending = begin(
            "worker",
            publish=self._publisher.run,
            renew=self._renew_forever,
            heartbeat=self._beat_forever,
            control=self._orders.listen,
            pause=self._pause.run,
            adapters=self._adapters.run,
            acknowledge=self._adapters.acknowledge,
            memory=self._memory.run,
            machine_memory=self._machine.watch_memory,
            machine_power=self._machine.watch_power,
        )
        tending.append(asyncio.create_task(self._watch.run()))
        try:
            await self._stop.wait()
            await self._lodging.close(hopeless=self._death is not None)  # a train step may still need rows
            await cancel(claiming)
            farewell = Farewell(self._redis, self._queue, self.id, self._returns, self.rows, self._peers)
            if self._death is None:
                self._state = "draining"
                with contextlib.suppress(RedisError, OSError):
                    async with asyncio.timeout(LAST_WORDS_S):
                        await self._beat()
                if not self._settings.drain_batch:
                    await farewell.hand_back_batch()
                await farewell.finish_rows(
                    self._settings.drain_grace_s, lambda: self._death is not None or self._pause.frozen
                )
            await farewell.hand_back(failed=self._death is not None)
        finally:
            await cancel(claiming + tending)

    # -- claiming

    async def _claim_forever(self) -> None:
        waiting: asyncio.Task[bool] | None = None
        try:
            while True:
                self.rows.changed.clear()
                async with self._pause.gate:
                    plan = plan if (plan := self._plan()).rows else self._plan(full=True)
                    claims = await self._queue.claim(self.id, plan, self._others) if plan.rows > 0 else []
                    self._counts.sequences.rates.claimed(plan, claims, time.monotonic())
                    if claims:
                        await self._admit(claims)
                        continue
                freed = asyncio.create_task(self.rows.changed.wait())
                waits: set[asyncio.Task[bool]] = {asyncio.ensure_future(freed)}
                if plan.rows > 0:
                    waiting = waiting or asyncio.create_task(self._queue.wait(self.id, WAIT_S))
                    waits.add(waiting)
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                freed.cancel()
                if waiting is not None and waiting.done():
                    waiting.result()
                    waiting = None
        finally:
            if waiting is not None:
                await cancel([waiting])

    def _plan(self, *, full: bool = False) -> ClaimPlan:
        if self._pause.on:
            return NOTHING
        stats, most = self._engine.stats(), self._machine.most_rows
        return claim_plan(
            self.rows,
            self._settings,
            self._card,
            stats.kv_limit_bytes,
            most_rows=most,
            full=full,
            shares=stats.shares_prompts,
        )

    async def _admit(self, claims: list[Claim]) -> None:
        requests: list[RowRequest] = []
        self._memory.claimed([claim.spec for claim in claims])
        await self._publisher.fence([claim for claim in claims if claim.attempt > 1 and claim.spec.api])
        for claim in claims:
            prior: list[TokenEvent] = []
            if claim.attempt > 1:
                prior = await read_tokens(self._redis, self._card.name, claim.spec.id, 0, claim.spec.api)
                self._counts.takeovers.add()
                log.info("worker.took_over", sequence=claim.spec.id, attempt=claim.attempt, events=len(prior))
            self.rows.add(row := ClaimedRow.after(claim, prior))
            requests.append(RowRequest(claim.spec, claim.attempt, tuple(row.events)))
        gone = self._returns.make_room(len(self.rows.occupying()) - self._machine.most_rows)
        await self._preparing.take(requests)
        if gone:
            self._counts.sequences.preemptions.add(len(gone))
            await self._returns.hand_back(gone)
            log.info("worker.made_room", sequences=len(gone))
        for request in requests:
            self._orders.welcome(request.spec.id)
            if request.prior:
                self._publisher.flush_log(request.spec.id)  # for a reader that missed a frame of the old owner
        if self._settings.prefix_cache_gb:
            with contextlib.suppress(RedisError, OSError):
                await self._notes.note([claim.spec for claim in claims if claim.spec.cache])

    def _cancel(self, seq: str, reason: EndReason) -> None:
        self._engine.send(Cancel(seq, reason))

    async def _submitted(self, rows: list[ClaimedRow]) -> None:
        """Rows have reached the engine late: obey what was said of them meanwhile."""
        for row in rows:
            if self._pause.aborts(row):
                self._cancel(row.id, "abort")
        with contextlib.suppress(RedisError, OSError):
            await self._orders.reread(rows)

    async def _reap_forever(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 6)
            async with self._pause.gate:
                rows = self._plan().rows
                if rows > 0 and await self._queue.may_reap(self.id):
                    claims = await self._queue.reap(self.id, rows)
                    if claims:
                        log.info("worker.reaped", sequences=len(claims))
                        await self._admit(claims)

    # -- leases

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await self._renew()

    async def _renew(self) -> None:
        began = time.monotonic()
        for claim in await self._queue.renew(self.id, [row.claim for row in self.rows]):
            row = self.rows.get(claim.spec.id)
            if row is not None and row.claim is claim and row.occupies_row:
                log.warning("worker.lease_lost", sequence=claim.spec.id, attempt=claim.attempt)
                self.rows.leave(claim)
                self._cancel(claim.spec.id, "cancelled")
        self._publisher.verified_at = began

    # -- the engine's side, called in its thread

    def _on_loop(self, call: Callable[[T], None], value: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are stopping
            self._loop.call_soon_threadsafe(call, value)

    def _on_step(self, output: StepOutput) -> None:
        self._on_loop(self._publisher.take, output.events)

    def _on_adapters(self, stats: AdapterStats) -> None:
        self._on_loop(self._hear_of_adapters, stats)

    def _hear_of_adapters(self, stats: AdapterStats) -> None:
        self._adapters.on_stats()
        self._counts.adapters(stats)

    def _on_death(self, error: BaseException) -> None:
        log.error("worker.engine_died", error=repr(error))
        self._on_loop(self._give_up, error)

    # -- the watch's side, and the group's

    def _on_lost(self, reason: str) -> None:
        """A rank has gone. Ours is of no use without it, and may never come out of the collective that it is in."""
        self.stalled = True
        self._give_up(EngineError(f"the group is lost: {reason}"))

    def _on_stall(self, reason: str) -> None:
        log.error("worker.engine_stuck", reason=reason, rows=len(self.rows))
        self.stalled = self._engine.alive
        self._give_up(EngineError(reason))

    def _give_up(self, error: BaseException) -> None:
        """The engine is of no use any more: hand everything back and end."""
        self._death = self._death or error
        self._state = "stuck"
        self._stop.set()
        self.rows.changed.set()

    # -- heartbeat

    def _shown_state(self) -> WorkerState:
        if self._watch.suspects:
            return "stuck"
        rests = self._pause.rests_under or self._machine.rests
        return "paused" if rests and self._state == "ready" else self._state

    def _shown_ranks(self) -> tuple[RankStatus, ...]:
        return () if self._group is None else self._group.ranks()

    async def _beat_forever(self) -> None:
        beats = 0
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            beats += 1
            if beats % REFRESH_MODEL_EVERY == 0:
                await self._registry.register_model(self._card, self._tokenizer)
            if beats % LOOK_FOR_ORPHANS_EVERY == 0:
                await self._orders.end_orphans()
            await self._beat()

    def _status(self) -> WorkerStatus:
        now, (then, tokens) = time.monotonic(), self._rate
        self._rate = (now, self._publisher.tokens)
        return worker_status(
            Identity(self.id, self._card, self._started_ms),
            self._settings,
            self._engine.stats(),
            self._engine.adapter_stats(),
            state=self._shown_state(),
            pause=self._pause.rests_under,
            loaded=self._adapters.loaded,
            tokens_per_s=(self._publisher.tokens - tokens) / max(1e-3, now - then),
            silent_s=self._watch.silent_s,
            machine=self._machine.status,
            court=self._court.standing,
            kv_address=self._peers.address,
            ranks=self._shown_ranks(),
            peers={**self._peers.figures, **self._counts.sequences.rates.figures(now, self._settings.max_batch_size)},
        )

    async def _beat(self) -> None:
        self._differing.heard(await self._registry.heartbeat(self._status()), time.monotonic())
        await self._peers.tend()
        await self._count()
        await self._adapters.tend()
        live = await self._registry.live(self._card.name)
        if self._settings.ssd_folder is not None:
            await self._adapters.send_lasting(live, self._settings.adapter_dtype)
        self._others = [other for other in live if other != self.id]

    async def _count(self) -> None:
        self._counts.gather(self._queue, self._engine.stats())
        await self._metrics.write()
