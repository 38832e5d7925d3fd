"""Which learners a process has in memory: it takes those that wait, and stores and drops those without requests.

Places go round. A tenant that waits gets one of those of a tenant which has two more than it, as soon as the request
under way there is done. Where tenants have as many, or a tenant's own learners wait, a learner that has had its place
for a turn gives it up in the same way. So a tenant may use all places while no other one wants any, and keeps none
waiting for longer than a turn and a request.

The leases are those of the list of waiting learners (shared/redis/due/due_list.py): a service renews them while it
lives, and what it loses by dying, another one takes. An owner that was frozen meanwhile is refused by the learner's
epoch.
"""

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from mlx_model.loader import LoadedModel
from mlx_model.memory import memory_status
from shared.errors import ParallmError
from shared.learners import LearnerSpec, ServiceCard
from shared.owners import whoever_it_is_for
from shared.process.loops import cancel
from shared.redis import keys
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.faults import reason
from shared.redis.training.learner_store import LearnerStore, waiting_learners
from shared.sequences import ModelCard
from trainer.learn.compute import ComputeHost
from trainer.learn.machine_care import MachineCare
from trainer.rollouts.pictures import ChatPictures
from trainer.rollouts.sight import sight_of
from trainer.service.learner import ServiceLearner
from trainer.service.run_learner import RunLearner
from trainer.service.seat import LostError, Seat, gone
from trainer.service.settings import LearnersSettings
from trainer.service.turns import Turns

log = structlog.get_logger()

_LOOK_S = 0.1  # how often it looks for learners that wait
_AGAIN_MS = 3_600_000  # a learner without requests is looked at again after this long; a request hastens it
_RETRY_MS = 1_000
_LEAVE_S = 5.0  # for the request under way
_NOTICE_S = 1.0  # an idle learner gives its place to a waiting one after this long
TURN_S = 10.0  # and a busy one, where its tenant has about as many places as the waiting one's
LONGEST_TURN_S = 60.0
HANDOVERS = (
    10.0  # so many times what storing a state took is a turn, within these: learning is to have most of the time
)


@dataclass(eq=False)
class _Place:
    """A learner that is in memory."""

    seat: Seat
    task: "asyncio.Task[None]"
    owner: str
    since: float = field(default_factory=time.monotonic)
    leaves: bool = False

    @property
    def had_s(self) -> float:
        return time.monotonic() - self.since


class LearnerService:
    """Trains the learners of one model that it gets hold of."""

    def __init__(
        self, settings: LearnersSettings, host: ComputeHost, loaded: LoadedModel, card: ModelCard, redis: Redis, id: str
    ) -> None:
        """`card`: how the ring calls the model."""
        self._settings, self._model, self._card, self._id = settings, loaded.model, card, id
        # A pass brings the tiles of its images along, and shows each when it is its turn.
        self._sight = sight_of(loaded, tile_bytes=0)
        self._pictures = None if self._sight is None else ChatPictures(self._sight)
        self._stopping = asyncio.Event()
        self._turns = Turns(host, MachineCare(settings, host), self._stopping)
        self._store = LearnerStore(redis)
        self._adapters = AdapterStore(redis, keep_n=settings.adapter_keep_n, who_asks=whoever_it_is_for)
        self._due = waiting_learners(redis, card.name)
        self._places: dict[str, _Place] = {}  # by learner
        self._coming: dict[str, str] = {}  # learners that get the place of one that leaves, and whose they are
        self._changes: set[asyncio.Task[None]] = set()
        self._turn_s = TURN_S

    def stop(self) -> None:
        """Store what learners have learned, give them back, and end."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        """True after `stop` was called."""
        return self._stopping.is_set()

    async def run(self) -> None:
        """Serve learners until the service is stopped."""
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
            await cancel(list(self._changes))
            with contextlib.suppress(RedisError, OSError):
                await self._due.again(list(self._coming), 0)
            for learner in list(self._places):
                with contextlib.suppress(RedisError, OSError):
                    await self._let_go(learner, 0, _LEAVE_S)
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            if self._pictures is not None:
                self._pictures.close()

    async def _look(self) -> None:
        """Take waiting learners, as far as there are free places or one becomes free."""
        for learner, place in list(self._places.items()):
            if place.seat.idle_s > self._settings.idle_s and not place.leaves:
                await self._let_go(learner, _AGAIN_MS, _LEAVE_S)
        for owner, learner in await self._due.take_in_turns(max(1, self._free), keys.LEARNER_LEASE_MS):
            if not await self._store.is_asked(learner):
                await self._due.again([learner], _AGAIN_MS)
            elif self._free > 0:
                await self._take(learner)
            elif (leaver := self._leaver(owner)) is not None:
                self._places[leaver].leaves = True
                self._coming[learner] = owner
                change = asyncio.create_task(self._change(leaver, learner))
                self._changes.add(change)
                change.add_done_callback(self._changes.discard)
            else:
                await self._due.again([learner], _RETRY_MS)

    @property
    def _free(self) -> int:
        """Places that no learner has and none is about to get; each one that comes gets that of one that leaves."""
        leaving = sum(place.leaves for place in self._places.values())
        return self._settings.max_learners - len(self._places) - (len(self._coming) - leaving)

    def _leaver(self, owner: str) -> str | None:
        """Which learner gives its place to one of this owner; None: none, for now."""
        staying = {learner: place for learner, place in self._places.items() if not place.leaves}
        has = Counter([*(place.owner for place in staying.values()), *self._coming.values()])

        def must(place: _Place) -> bool:
            more, turn_s = has[place.owner] - has[owner], self._turn_s
            if more > 1 and place.owner != owner:
                return True
            if more > 0 or place.owner == owner:
                return place.seat.idle_s >= _NOTICE_S or place.had_s >= turn_s
            return place.seat.idle_s >= turn_s

        leavers = [learner for learner, place in staying.items() if must(place)]
        if not leavers:
            return None
        # Of those that have most, the one that is idle for longest, else the one that came first.
        return max(leavers, key=lambda each: (has[staying[each].owner], staying[each].seat.idle_s, staying[each].had_s))

    async def _change(self, leaver: str, learner: str) -> None:
        """Give a learner's place to another one, once the request under way is done."""
        try:
            await self._let_go(leaver, 0, None)
            await self._take(learner)
        except (RedisError, OSError) as error:  # what is leased is looked at again when the lease is over
            log.warning("learners.redis_away", reason=reason(error))
        finally:
            self._coming.pop(learner, None)

    async def _take(self, learner: str) -> None:
        held = await self._store.take(learner)
        if held is None:
            await self._due.done(learner)
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
        self._places[learner] = _Place(seat, task, held.spec.owner)
        task.add_done_callback(partial(self._ended, learner))
        log.info("learner.taken", learner=learner, done=held.done, applied=held.applied)

    def _build(self, spec: LearnerSpec) -> ServiceLearner | RunLearner:
        if spec.run:
            return RunLearner(self._model, spec.run)
        return ServiceLearner(self._model, spec, self._settings.microbatch_tokens, self._sight)

    def _ended(self, learner: str, task: "asyncio.Task[None]") -> None:
        """A seat has ended by itself; one whose lease ran out may have another in its place, of this service, too."""
        error = None if task.cancelled() else task.exception()
        here = self._places.get(learner)
        if here is None or here.task is not task or here.leaves or task.cancelled():
            return
        del self._places[learner]
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

    async def _let_go(self, learner: str, in_ms: int, within_s: float | None) -> None:
        """Store a learner's state and give it back, to be looked at in so long or when it is asked.

        `within_s`: for the request under way; whoever takes the learner then carries it out again.
        """
        place = self._places[learner]
        place.leaves = True
        place.seat.leave()
        await asyncio.wait([place.task], timeout=within_s)
        place.task.cancel()
        await asyncio.gather(place.task, return_exceptions=True)
        began = time.monotonic()
        try:
            await place.seat.store_state()
        except LostError:  # whoever has taken it looks after it
            log.warning("learner.lost", learner=learner)
            return
        except (ParallmError, ValueError, RuntimeError, MemoryError):  # of the state: its requests are kept
            log.exception("learner.not_stored", learner=learner)
        finally:
            if self._places.get(learner) is place:
                del self._places[learner]
        self._turn_s = min(LONGEST_TURN_S, max(TURN_S, HANDOVERS * (time.monotonic() - began)))
        await self._due.again([learner], in_ms)
        log.info("learner.left", learner=learner)

    async def _renew(self) -> None:
        while True:
            try:
                await self._due.renew([*self._places, *self._coming], keys.LEARNER_LEASE_MS)
                await self._store.announce(
                    ServiceCard(
                        id=self._id,
                        model=self._card.name,
                        max_rank=self._settings.max_rank,
                        max_learners=self._settings.max_learners,
                        learners=len(self._places),
                        sees=self._sight is not None,
                        machine=await asyncio.to_thread(memory_status, self._settings.memory_limit_bytes),
                    )
                )
            except (RedisError, OSError) as error:
                log.warning("learners.redis_away", reason=reason(error))
            await asyncio.sleep(keys.LEARNER_LEASE_MS / 4000)
