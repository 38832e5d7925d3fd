"""Which learners a process has in memory: it takes those that wait, and lets those go that nobody asks.

The leases are those of the list of waiting learners (shared/redis/due/due_list.py): a service renews them while it
lives, and what it loses by dying, another one takes. An owner that was frozen meanwhile is refused by the learner's
epoch.
"""

import asyncio
import contextlib
from functools import partial

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.errors import ParallmError
from shared.learners import LearnerSpec, ServiceCard
from shared.owners import whoever_it_is_for
from shared.redis import keys
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.faults import reason
from shared.redis.training.learner_store import LearnerStore, waiting_learners
from shared.sequences import ModelCard
from trainer.learn.compute import ComputeHost
from trainer.rollouts.pictures import Pictures
from trainer.rollouts.sight import sight_of
from trainer.service.learner import ServiceLearner
from trainer.service.run_learner import RunLearner
from trainer.service.seat import LostError, Seat, gone
from trainer.service.settings import LearnersSettings
from trainer.service.turns import Turns
from worker.engine.model.loader import LoadedModel

log = structlog.get_logger()

_LOOK_S = 0.1  # how often it looks for learners that wait
_AGAIN_MS = 3_600_000  # a learner that nobody asks is looked at again after this long; a request hastens it
_RETRY_MS = 1_000
_LEAVE_S = 5.0  # for the request under way
_NOTICE_S = 1.0  # an idle learner gives its place to a waiting one after this long


class LearnerService:
    """Trains the learners of one model that it gets hold of."""

    def __init__(
        self, settings: LearnersSettings, host: ComputeHost, loaded: LoadedModel, card: ModelCard, redis: Redis, id: str
    ) -> None:
        """`card`: how the ring calls the model."""
        self._settings, self._model, self._card, self._id = settings, loaded.model, card, id
        # A pass brings the tiles of its images along, and shows each when it is its turn.
        self._sight = sight_of(loaded, tile_bytes=0)
        self._pictures = None if self._sight is None else Pictures(self._sight)
        self._turns = Turns(host)
        self._store = LearnerStore(redis)
        self._adapters = AdapterStore(redis, keep_n=settings.adapter_keep_n, who_asks=whoever_it_is_for)
        self._due = waiting_learners(redis, card.name)
        self._seats: dict[str, tuple[Seat, asyncio.Task[None]]] = {}
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Store what learners have learned, give them back, and end."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    async def run(self) -> None:
        """Until stopped."""
        renewing = asyncio.create_task(self._renew())
        try:
            while not self.stopping:
                try:
                    await self._look()
                except (RedisError, OSError) as error:
                    log.warning("learners.redis_away", reason=reason(error))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _LOOK_S)
        finally:
            for learner in list(self._seats):
                with contextlib.suppress(RedisError, OSError):
                    await self._let_go(learner, 0)
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            if self._pictures is not None:
                self._pictures.close()

    async def _look(self) -> None:
        """Take what waits, as far as there are places."""
        for learner, (seat, _) in list(self._seats.items()):
            if seat.idle_s > self._settings.idle_s:
                await self._let_go(learner, _AGAIN_MS)
        free = self._settings.max_learners - len(self._seats)
        for learner in await self._due.take(max(1, free), keys.LEARNER_LEASE_MS):
            if len(self._seats) < self._settings.max_learners or await self._made_room():
                await self._take(learner)
            else:
                await self._due.again([learner], _RETRY_MS)

    async def _made_room(self) -> bool:
        """Whether a learner that has been idle has left, the longest idle first."""
        idlest = max(self._seats, key=lambda name: self._seats[name][0].idle_s)
        if self._seats[idlest][0].idle_s < _NOTICE_S:
            return False
        await self._let_go(idlest, _AGAIN_MS)
        return True

    async def _take(self, learner: str) -> None:
        held = await self._store.take(learner)
        if held is None:
            await self._due.done(learner)
            return
        if held.done == held.applied and not await self._store.waits(learner, held.done + 1):
            await self._due.again([learner], _AGAIN_MS)
            return
        seat = Seat(
            held,
            self._store,
            self._adapters,
            self._turns,
            self._card,
            state_every=self._settings.state_every,
            state_after_s=self._settings.state_after_s,
            max_saves=self._settings.max_saves,
            pictures=self._pictures,
        )
        task = asyncio.create_task(seat.run(partial(self._build, held.spec)))
        self._seats[learner] = (seat, task)
        task.add_done_callback(partial(self._ended, learner))
        log.info("learner.taken", learner=learner, done=held.done, applied=held.applied)

    def _build(self, spec: LearnerSpec) -> ServiceLearner | RunLearner:
        if spec.run:
            return RunLearner(self._model, spec.run)
        return ServiceLearner(self._model, spec, self._settings.microbatch_tokens, self._sight)

    def _ended(self, learner: str, task: "asyncio.Task[None]") -> None:
        """A seat has ended by itself."""
        here = self._seats.get(learner)
        if here is None or here[1] is not task or task.cancelled():
            return
        del self._seats[learner]
        self._turns.forget(learner)
        error = task.exception()
        if isinstance(error, LostError):
            log.warning("learner.lost", learner=learner)
            return
        if isinstance(error, (RedisError, OSError)):
            log.warning("learner.redis_away", learner=learner, reason=reason(error))
        elif error is not None and not isinstance(error, ParallmError):
            log.error("learner.broken", learner=learner, exc_info=error)
        again = asyncio.ensure_future(
            self._due.done(learner) if error is not None and gone(error) else self._due.again([learner], _RETRY_MS)
        )
        again.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _let_go(self, learner: str, in_ms: int) -> None:
        """Store a learner's state and give it back, to be looked at in so long or when it is asked."""
        seat, task = self._seats.pop(learner)
        seat.leave()
        await asyncio.wait([task], timeout=_LEAVE_S)
        task.cancel()  # what it was at is carried out again, by whoever takes the learner
        await asyncio.gather(task, return_exceptions=True)
        try:
            await seat.store_state()
        except LostError:  # whoever has taken it looks after it
            log.warning("learner.lost", learner=learner)
            return
        except (ParallmError, ValueError, RuntimeError, MemoryError):  # of the state: its requests are kept
            log.exception("learner.not_stored", learner=learner)
        finally:
            self._turns.forget(learner)
        await self._due.again([learner], in_ms)
        log.info("learner.left", learner=learner)

    async def _renew(self) -> None:
        while True:
            try:
                await self._due.renew(list(self._seats), keys.LEARNER_LEASE_MS)
                await self._store.announce(
                    ServiceCard(
                        id=self._id,
                        model=self._card.name,
                        max_rank=self._settings.max_rank,
                        max_learners=self._settings.max_learners,
                        learners=len(self._seats),
                        sees=self._sight is not None,
                    )
                )
            except (RedisError, OSError) as error:
                log.warning("learners.redis_away", reason=reason(error))
            await asyncio.sleep(keys.LEARNER_LEASE_MS / 4000)
