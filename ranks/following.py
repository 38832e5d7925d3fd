"""A follower's process: it finds rank 0, loads its part of the model, and takes every turn that rank 0 takes.

What a turn is, a kind of process says: a worker in worker/group/engine_rank.py, a trainer in trainer/learners/group.py.
It speaks Redis to find its group. Whatever goes wrong here ends the process, and with it the group; rank 0's end is
ours.
"""

import asyncio
import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Protocol

import msgspec
import structlog

from mlx_model.loader import LoadedModel, model_folder
from mlx_model.memory import memory_status
from ranks import meeting
from ranks.backend import Jaccl, backend_of, join, listens_at, own_places
from ranks.channel import FAILED, ChannelError, OutcomeSum, TurnsIn
from ranks.followers import MAGIC
from ranks.lead import LIFE_SIGNS, loaded_of
from ranks.messages import (
    Alive,
    EngineTurn,
    Fetch,
    FromFollower,
    FromLead,
    GroupEnd,
    Hello,
    LoadModel,
    Lost,
    TurnsTaken,
    Unit,
    UnitFailed,
)
from ranks.placement import Placement, RankSettings
from shared.errors import ServiceUnavailableError, SetupError
from shared.machine.status import MachineStatus
from shared.redis.connection.client import connect
from shared.wire import Channel, Connection, PeerError, greet

log = structlog.get_logger()

PATIENCE_S = 30.0  # with a rank 0 that says nothing: clients do not wait for this rank
WORDS = 64 << 20  # bytes of what rank 0 says, an adapter's description among it
CONNECT_S = 5.0
_DECODER = msgspec.msgpack.Decoder(FromLead)


class Learning(Protocol):
    """Computes a learner's units on this rank."""

    def unit(self, ask: bytes) -> bytes:
        """The next one, or the first one of what is asked; what came of it, which is the same on all ranks."""


class Follower(ABC):
    """One rank but rank 0."""

    def __init__(self, settings: RankSettings, placed: Placement) -> None:
        self._settings, self._placed = settings, placed
        self._jaccl = Jaccl(settings.distributed_ibv_devices, settings.distributed_jaccl_coordinator)
        self._outcome = OutcomeSum()
        self._tasks: set[asyncio.Task[None]] = set()
        self._saying = asyncio.Lock()
        self._talk: Channel | None = None
        self.machine = MachineStatus()

    async def run(self) -> int:
        """Follow until rank 0 ends, or something does; the exit code. SetupError when we are no rank of its group."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._redis = connect(self._settings.redis)
        met = asyncio.ensure_future(self._meet())
        waits: set[asyncio.Future[Any]] = {met, self._ended}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not met.done():
            return await self._ended
        begin = met.result()
        thread = threading.Thread(target=self._follow, args=(begin,), name="engine", daemon=True)
        thread.start()
        assert self._talk is not None, "we have met"
        self._begin(self._listen(self._talk))
        self._begin(self._report_progress())
        return await self._ended

    def stop(self) -> None:
        """End this rank on a signal, and with it the group."""
        self._say(Lost("it got a signal to end"))
        self._loop.call_later(0.2, self._end, 0)

    # -- what a kind of process says

    @abstractmethod
    def _load(self, begin: LoadModel, group: Any) -> LoadedModel:
        """Load what this rank has of the model; in thread G."""

    @abstractmethod
    def _take(self, turn: EngineTurn | Unit) -> None:
        """Do what rank 0 does; in thread G."""

    def _hear(self, message: Fetch) -> None:
        """Handle another message of rank 0, on the event loop."""
        log.warning("group.not_done", rank=self._placed.rank, asked=type(message).__name__)

    # -- the event loop's

    async def _meet(self) -> LoadModel:
        """Find rank 0 and connect to it; what it says when all are here."""
        placed, settings = self._placed, self._settings
        backend = backend_of(placed)
        if backend == "jaccl":
            self._jaccl.check(placed)
        folder = await asyncio.to_thread(model_folder, settings.model)
        while True:
            secret = await meeting.secret_of(self._redis, placed)
            places = own_places(placed, backend, listens_at(settings, placed))
            ours = meeting.own_member(placed, backend, places, folder)
            place = await meeting.look_for(self._redis, placed, ours)
            try:
                line, turns = await self._connect(place.address, secret, ours.nonce, "turns")
                _, self._talk = talk = await self._connect(place.address, secret, ours.nonce, "talk")
                self._connection.stall_s = meeting.PATIENCE_S
                begin = _decoded(await talk[1].receive(WORDS))
            except PeerError as error:
                log.warning("group.not_met", rank=placed.rank, address=place.address, reason=str(error))
                await asyncio.sleep(meeting.LOOK_S)
                continue
            if not isinstance(begin, LoadModel):
                raise ServiceUnavailableError("rank 0 has ended before it began")
            await meeting.leave(self._redis, placed)
            self._connection.stall_s = PATIENCE_S
            self._turns = TurnsIn(line, turns.keys[1])
            return begin

    async def _connect(self, address: str, secret: bytes, nonce: str, line: str) -> tuple[socket.socket, Channel]:
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_S):
                found = await self._loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
                family, kind, protocol, _, where = found[0]
                sock = socket.socket(family, kind, protocol)
                sock.setblocking(False)
                await self._loop.sock_connect(sock, where)
        except (OSError, TimeoutError) as error:
            raise PeerError(f"rank 0 cannot be reached: {error}") from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = Connection(sock)
        channel = await greet(self._connection, secret, MAGIC)
        await channel.say(Hello(self._placed.rank, nonce, line))
        return sock, channel

    async def _listen(self, talk: Channel) -> None:
        try:
            while True:
                match _decoded(await talk.receive(WORDS)):
                    case Fetch() as message:
                        self._hear(message)
                    case GroupEnd(why, is_setup):
                        if why:
                            log.warning("group.ends", rank=self._placed.rank, reason=why)
                        self._end(2 if is_setup else 1 if why else 0)
                        return
                    case Alive():
                        pass
        except PeerError as error:
            log.warning("group.rank_0_lost", rank=self._placed.rank, reason=str(error))
            self._end(1)

    async def _report_progress(self) -> None:
        """Give signs of life for ever."""
        limit = self._settings.memory_limit_bytes
        while True:
            self.machine = await asyncio.to_thread(memory_status, limit)
            await self._talk_say(TurnsTaken(self._outcome.turn, self._outcome.sum, self.machine))
            await asyncio.sleep(self._settings.distributed_silence_s / LIFE_SIGNS)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _talk_say(self, message: FromFollower) -> None:
        if self._talk is None:
            return
        async with self._saying:
            with contextlib.suppress(PeerError, RuntimeError):  # the listening task sees it, too, and ends the loop
                await self._talk.say(message)

    def _say(self, message: FromFollower) -> None:
        """Send a message from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(lambda: self._begin(self._talk_say(message)))

    def _end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    # -- thread G's

    def _follow(self, begin: LoadModel) -> None:
        rank, code = self._placed.rank, 1
        try:
            group = join(self._placed, begin.backend, begin.places, self._jaccl)
            loaded = self._load(begin, group)
            self._say(loaded_of(loaded))
            log.info("group.rank_ready", rank=rank, of=self._placed.size, model=loaded.card.name)
            while True:
                self._take(self._turns.next())
        except ChannelError as error:
            log.info("group.no_more_turns", rank=rank, reason=str(error))  # the other connection says why
        except SetupError as error:
            log.error("group.cannot_follow", rank=rank, reason=str(error))
            self._say(Lost(str(error), is_setup=True))
            code = 2
        except BaseException as error:
            log.exception("group.rank_failed", rank=rank)
            self._say(Lost(f"{type(error).__name__}: {error}"))
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.call_later, 0.2, self._end, code)  # once its last word is out

    def _learn(self, unit: Unit, learning: Learning) -> None:
        """Do a unit of a learner's work; where it fails, it is for rank 0 to say whether that is the data's fault."""
        try:
            result = learning.unit(unit.ask)
        except Exception as error:
            log.exception("group.unit_failed", rank=self._placed.rank)
            self._say(UnitFailed(unit.number, f"{type(error).__name__}: {error}"))
            result = FAILED
        self._outcome.add_unit(unit.number, result)


def _decoded(data: bytearray) -> object:
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise PeerError("rank 0 said what is no message") from error
