"""Rank 0's side of a group: it gathers the others, sends them its turns, and sees when one is lost.

Two threads use it: the one that computes (of a worker thread G), and the event loop. What both need stands under one
lock. What only a worker's ranks do is in worker/group/engine_lead.py.

Invariants. A turn is sent to all before rank 0 begins it. The group is lost once and for all: then `lost` says why,
nothing more is sent, and every waiter here gets an error.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import structlog
from redis.asyncio import Redis

from mlx_model.config import EngineConfig, SlotConfig
from mlx_model.loader import LoadedModel, model_folder
from ranks import meeting
from ranks.backend import Jaccl, backend_of, join, listens_at, own_places
from ranks.channel import FAILED, ChannelError, OutcomeSum
from ranks.children import Children
from ranks.followers import FollowerLink, Reception
from ranks.messages import (
    Alive,
    EngineTurn,
    GroupEnd,
    LoadModel,
    Lost,
    ModelLoaded,
    Stopping,
    TurnsTaken,
    Unit,
    UnitFailed,
    UnitPart,
)
from ranks.placement import Placement, RankSettings, with_port
from shared.errors import ServiceUnavailableError, SetupError
from shared.ranks import RankStatus
from shared.redis.connection.client import connect

log = structlog.get_logger()
T = TypeVar("T")

START_S = 1800.0  # to load a part of a model from a slow disk
KEPT_SUMS = 8192  # of the latest turns
LONG_ASK = 64 << 20  # bytes in one message
LIFE_SIGNS = 4  # in the time after which silence is death
LAST_WORDS_S = 1.0


class GroupLead:
    """Rank 0's side of a group of workers or trainers. `on_lost` is called once, on the event loop."""

    def __init__(
        self,
        settings: RankSettings,
        placed: Placement,
        on_lost: Callable[[str], None],
        config: EngineConfig,
        adapters: SlotConfig | None,
        on_stopping: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_stopping`: another rank was asked to end, and does so with us."""
        self._settings, self._placed, self._on_lost = settings, placed, on_lost
        self._config, self._adapters, self._on_stopping = config, adapters, on_stopping
        self._wake: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[Any] = self._loop.create_future()
        self._jaccl = Jaccl(settings.distributed_ibv_devices, settings.distributed_jaccl_coordinator)
        self._backend = backend_of(placed)
        self._children = Children(settings, placed, self._on_exit)
        self.followers: list[FollowerLink] = []
        self._members: list[meeting.GroupMember] = []
        self._lock = threading.Condition()  # notified of failures
        self._number = 0
        self._rehearsal = 0  # the latest turn that may take as long as a start: it compiles kernels
        self._outcome = OutcomeSum()
        self.sums: dict[int, int] = {}
        self.all_loaded: Future[None] = Future()
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False
        self._ours: ModelLoaded | None = None
        self.lost = ""

    # -- the event loop's: start and end

    async def open(self, wake: Callable[[], None]) -> None:
        """Have all ranks here, and let them load the model; SetupError when they do not fit together.

        `wake`: makes our engine take a turn.
        """
        self._wake = wake
        if self._backend == "jaccl":
            self._jaccl.check(self._placed)
        redis = connect(self._settings.redis)
        try:
            await self._gather(redis)
        finally:
            await redis.aclose()
        places = [member.places for member in self._members]
        begin = LoadModel(self._config, self._adapters, places, self._backend)
        for follower in self.followers:
            await follower.say(begin)
            self._tasks.append(asyncio.create_task(self._listen(follower)))
        self._tasks.append(asyncio.create_task(self._tend()))
        log.info("group.begins", ranks=self._placed.size, backend=self._backend)

    async def _gather(self, redis: Redis) -> None:
        secret = await meeting.secret_of(redis, self._placed)
        if not secret:
            raise ServiceUnavailableError("Redis does not keep the secret by which ranks know one another")
        address = listens_at(self._settings, self._placed)
        folder = await asyncio.to_thread(model_folder, self._settings.model)
        places = own_places(self._placed, self._backend, address)
        ours = meeting.own_member(self._placed, self._backend, places, folder)
        async with Reception(secret) as reception:
            port = reception.listen(address)
            if self._placed.is_local:
                await self._children.start()
            met = meeting.gather(redis, self._placed, ours, with_port(address, port), reception.complete)
            self._members = await self.unless_lost(met)
            for rank, member in enumerate(self._members[1:], 1):
                self.followers.append(reception.take(rank, member.nonce, member.host))

    async def unless_lost(self, work: Awaitable[T]) -> T:
        """Result of `work`; ServiceUnavailableError or SetupError if a rank is lost before it is there."""
        task = asyncio.ensure_future(work)
        await asyncio.wait({task, self._gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise self._gone.result()
        return task.result()

    async def close(self, error: BaseException | None = None) -> None:
        """Let the others end; `error`: what this one ends for."""
        self._ending = True
        is_setup = isinstance(error, SetupError)
        reason = self.lost or ("" if error is None else f"rank 0: {error}")
        for task in self._tasks:
            task.cancel()
        for follower in self.followers:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(LAST_WORDS_S):
                    await follower.say(GroupEnd(reason, is_setup))
        if self.lost or error is not None:
            self._children.kill()
        await self._children.close()
        for follower in self.followers:
            follower.close()

    # -- the event loop's: what followers say

    async def _listen(self, follower: FollowerLink) -> None:
        try:
            while True:
                self._hear(follower, await follower.hear())
        except Exception as error:
            self._lose(f"rank {follower.rank} ({follower.host}): {error}")

    def _hear(self, follower: FollowerLink, message: object) -> None:
        match message:
            case TurnsTaken(turn, sum_, machine):
                follower.progress(turn, sum_, machine)
            case ModelLoaded():
                follower.loaded = message
                self._compare()
            case UnitFailed(number, reason):
                with self._lock:
                    follower.failed, follower.failed_at = number, time.monotonic()
                    follower.failure = follower.failure or reason  # what comes after it comes of it
                    self._lock.notify_all()
            case Stopping():
                self._on_stopping()
            case Lost(reason, is_setup):
                message = f"rank {follower.rank} ({follower.host}): {reason}"
                self._lose(message, SetupError(message) if is_setup else None)

    def _compare(self) -> None:
        """Once all have loaded something: whether it is the same."""
        ours, theirs = self._ours, [follower.loaded for follower in self.followers]
        if ours is None or any(each is None for each in theirs) or self.all_loaded.done():
            return
        for follower, loaded in zip(self.followers, theirs, strict=True):
            assert loaded is not None, "seen just now"
            for what in ModelLoaded.__struct_fields__:
                if getattr(loaded, what) != getattr(ours, what):
                    named = f"rank {follower.rank} ({follower.host}) has loaded other {what} than rank 0"
                    self.all_loaded.set_exception(SetupError(f"{named}: ranks of one group need the same model"))
                    return
        self.all_loaded.set_result(None)

    async def _tend(self) -> None:
        """Give signs of life, and look at those of the others."""
        silence_s = self._settings.distributed_silence_s
        while True:
            for follower in self.followers:
                try:
                    await follower.say(Alive())
                except Exception as error:
                    self._lose(f"rank {follower.rank} ({follower.host}): {error}")
            await asyncio.sleep(silence_s / LIFE_SIGNS)
            with self._lock:
                number, sums = self._number, self.sums
                rehearsal = self._rehearsal
                wrong = [each for each in self.followers if sums.get(each.turn, each.sum) != each.sum]
                done = self._outcome.turn
            now = time.monotonic()
            for follower in self.followers:
                if follower.looked_at() > LIFE_SIGNS and follower.loaded:
                    self._lose(f"rank {follower.rank} ({follower.host}) has said nothing for {silence_s:g} s")
                turn_s = START_S if follower.turn < rehearsal else self._settings.distributed_turn_s
                if follower.behind_s(number, now) > turn_s:
                    self._lose(
                        f"rank {follower.rank} ({follower.host}) has not finished turn {follower.turn + 1} for "
                        f"{turn_s:g} s"
                    )
                if follower.failed > done and now - follower.failed_at > silence_s:  # we may wait for it for ever
                    self._lose(f"rank {follower.rank} ({follower.host}): {follower.failure}")
            for follower in wrong:
                differs = f" has computed something else in turn {follower.turn}"
                what = f": {follower.failure}" if follower.failure else differs
                self._lose(f"rank {follower.rank} ({follower.host}){what}")

    def _on_exit(self, rank: int, code: int) -> None:
        message = f"rank {rank}'s process has ended with exit code {code}"
        self._lose(
            message, SetupError(f"{message}; its last line says why") if code == 2 and not self._number else None
        )

    def _lose(self, reason: str, error: Exception | None = None) -> None:
        """Declare the group lost; on the event loop."""
        if self.lost or self._ending:
            return
        self.lost = reason
        log.error("group.lost", reason=reason)
        with self._lock:
            self._lock.notify_all()
        for follower in self.followers:
            follower.close()  # a rank that waits in a collective with us sees that it will not end
        self._children.kill()
        failure = error or ServiceUnavailableError(f"the group is lost: {reason}")
        if not self._gone.done():
            self._gone.set_result(failure)
        if not self.all_loaded.done():
            self.all_loaded.set_exception(failure)
        self._on_lost(reason)

    # -- the event loop's: what is shown

    def ranks(self) -> tuple[RankStatus, ...]:
        """Status of every rank, for the heartbeat."""
        now = time.monotonic()
        address = listens_at(self._settings, self._placed)
        first = RankStatus(0, socket.gethostname(), address, self._backend, "lost" if self.lost else "ready")
        others = (each.status(self._backend, self._number, now, self.lost) for each in self.followers)
        return (first, *others)

    # -- of the thread that computes

    def join(self) -> Any:
        """Connect to them; a group of MLX."""
        return join(self._placed, self._backend, [member.places for member in self._members], self._jaccl)

    def ready(self, loaded: LoadedModel) -> None:
        """Wait until all have loaded what we have; SetupError when it is something else."""
        self._ours = loaded_of(loaded)
        self._loop.call_soon_threadsafe(self._compare)
        self.all_loaded.result(START_S)

    def _send(self, message: EngineTurn | Unit | UnitPart) -> None:
        data = msgspec.msgpack.encode(message)
        for follower in self.followers:
            try:
                follower.turns.send(data)
            except ChannelError as error:
                reason = f"rank {follower.rank} ({follower.host}): {error}"
                self._loop.call_soon_threadsafe(self._lose, reason)
                raise ServiceUnavailableError(f"the group is lost: {reason}") from error

    def _keep_sum(self) -> None:
        self.sums[self._number] = self._outcome.sum
        self.sums.pop(self._number - KEPT_SUMS, None)

    # -- of the thread in which a learner computes, which in a worker is thread G (trainer/learn/compute.py:Others)

    def unit(self, ask: bytes) -> None:
        """Let them do a unit of work: the first one of what `ask` says, or with b"" the next of what is under way."""
        if self.lost:
            raise ServiceUnavailableError(f"the group is lost: {self.lost}")
        with self._lock:
            self._number += 1
        *parts, rest = [ask[at : at + LONG_ASK] for at in range(0, len(ask), LONG_ASK)] or [b""]
        for part in parts:
            self._send(UnitPart(part))
        self._send(Unit(self._number, rest))

    def united(self, result: bytes) -> None:
        """Report the result of this rank's latest unit; if another rank's differs, the group is lost."""
        with self._lock:
            self._outcome.add_unit(self._number, result)
            self._keep_sum()

    def failed(self) -> None:
        """It has failed here: returns when it has failed everywhere; ServiceUnavailableError when it has not.

        A rank that has not failed waits in a sum for us, and would take the next one for it.
        """
        number, followers = self._number, self.followers
        with self._lock:
            self._lock.wait_for(
                lambda: self.lost or all(each.failed == number for each in followers),
                self._settings.distributed_silence_s,
            )
            others = [each for each in followers if each.failed != number]
            if not others:
                for each in followers:
                    each.failure = ""  # ours, too: it is the data's fault
        if others or self.lost:
            reason = self.lost or f"rank {others[0].rank} ({others[0].host}) has not failed where rank 0 has"
            self._loop.call_soon_threadsafe(self._lose, reason)
            raise ServiceUnavailableError(f"the group is lost: {reason}")
        self.united(FAILED)


def loaded_of(loaded: LoadedModel) -> ModelLoaded:
    """Properties that all ranks must share after loading."""
    card = loaded.card
    return ModelLoaded(card.base_sha256, card.tokenizer_sha256, card.kv_bytes_per_token, card.vision)
