"""A follower's process: it finds rank 0, loads its part of the model, and takes every turn that rank 0 takes.

It speaks Redis only to find its group and to fetch adapters. Whatever goes wrong here ends the process, and with it the
group; rank 0's end is ours.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import structlog
from redis.exceptions import RedisError

from shared.adapters import AdapterManifest
from shared.errors import ServiceUnavailableError, SetupError
from shared.process.settings import WorkerSettings
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.client import connect
from shared.redis.connection.faults import reason
from worker.adapters.cache import DiskCache
from worker.engine.build import Built, build
from worker.engine.model.loader import model_folder
from worker.engine.orders import Order, Provide, Withdraw, obey
from worker.group import meeting
from worker.group.backend import Jaccl, backend_of, join, listens_at, own_places
from worker.group.followers import MAGIC
from worker.group.lead import LIFE_SIGNS, loaded_of
from worker.group.messages import (
    Alive,
    Begin,
    End,
    Fetch,
    Fetched,
    FromFollower,
    FromLead,
    Hello,
    Lost,
    Progress,
    Read,
    Turn,
    Woken,
)
from worker.group.placement import Placement
from worker.group.turns import LineError, Outcome, TurnsIn
from worker.peers.directory import ring_secret
from worker.peers.wire import Channel, Connection, PeerError, greet

log = structlog.get_logger()

PATIENCE_S = 30.0  # with a rank 0 that says nothing: whoever waits for our sequences does not wait for us
WORDS = 64 << 20  # bytes of what rank 0 says, an adapter's description among it
CONNECT_S = 5.0
_DECODER = msgspec.msgpack.Decoder(FromLead)


class Follower:
    """One rank but rank 0."""

    def __init__(self, settings: WorkerSettings, placed: Placement) -> None:
        self._settings, self._placed = settings, placed
        self._jaccl = Jaccl(settings.distributed_ibv_devices, settings.distributed_jaccl_coordinator)
        self._outcome = Outcome()
        self._files: dict[str, tuple[Path, AsyncExitStack]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._saying = asyncio.Lock()
        self._talk: Channel | None = None

    async def run(self) -> int:
        """Follow until rank 0 ends, or something does; the exit code. SetupError when we are no rank of its group."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._redis = connect(self._settings.redis)
        self._store = AdapterStore(self._redis)
        s = self._settings
        self._cache = DiskCache(s.adapter_cache_dir, int(s.adapter_cache_gb * 1e9))
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
        self._begin(self._tell())
        return await self._ended

    def stop(self) -> None:
        """Told to end: so the group does."""
        self._say(Lost("it was told to end"))
        self._loop.call_later(0.2, self._end, 0)

    # -- the event loop's

    async def _meet(self) -> Begin:
        """Find rank 0 and connect to it; what it says when all are here."""
        placed, settings = self._placed, self._settings
        backend = backend_of(placed)
        if backend == "jaccl":
            self._jaccl.check(placed)
        folder = await asyncio.to_thread(model_folder, settings.model)
        while True:
            try:
                secret = await ring_secret(self._redis)
            except (RedisError, OSError) as error:
                log.warning("group.redis_trouble", error=reason(error))
                await asyncio.sleep(meeting.LOOK_S)
                continue
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
            if not isinstance(begin, Begin):
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
                    case Fetch(number, manifest):
                        self._begin(self._fetch(number, manifest))
                    case End(why, is_setup):
                        if why:
                            log.warning("group.ends", rank=self._placed.rank, reason=why)
                        self._end(2 if is_setup else 1 if why else 0)
                        return
                    case Alive():
                        pass
        except PeerError as error:
            log.warning("group.rank_0_lost", rank=self._placed.rank, reason=str(error))
            self._end(1)

    async def _tell(self) -> None:
        """Give signs of life for ever."""
        while True:
            await self._talk_say(Progress(self._outcome.turn, self._outcome.sum))
            await asyncio.sleep(self._settings.distributed_silence_s / LIFE_SIGNS)

    async def _fetch(self, number: int, manifest: AdapterManifest) -> None:
        fault = ""
        if manifest.id not in self._files:
            file = AsyncExitStack()
            try:
                path = await file.enter_async_context(self._cache.hold(self._store, manifest))
                self._files[manifest.id] = path, file
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
        await self._talk_say(Fetched(number, fault))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _talk_say(self, message: FromFollower) -> None:
        if self._talk is None:
            return
        async with self._saying:
            with contextlib.suppress(PeerError, RuntimeError):  # whoever listens sees it, too, and ends the loop
                await self._talk.say(message)

    def _say(self, message: FromFollower) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(lambda: self._begin(self._talk_say(message)))

    def _end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    # -- thread G's

    def _follow(self, begin: Begin) -> None:
        rank, code = self._placed.rank, 1
        try:
            self._take_turns(self._built(begin))
        except LineError as error:
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

    def _built(self, begin: Begin) -> Built:
        s = self._settings
        config = replace(
            begin.config,
            model=s.model,
            trust_remote_code=s.trust_remote_code,
            kv_limit_bytes=int(s.kv_memory_gb * 1e9) or None,
        )
        group = join(self._placed, begin.backend, begin.places, self._jaccl)
        built = build(config, begin.adapters, group, lambda: self._say(Woken()))
        self._say(loaded_of(built.loaded))
        log.info("group.rank_ready", rank=self._placed.rank, of=self._placed.size, model=built.loaded.card.name)
        return built

    def _take_turns(self, built: Built) -> None:
        engine, slots = built.engine, built.slots
        while True:
            turn: Turn = self._turns.next()
            seen = engine.seen()
            if seen.is_news:
                self._say(Read(seen.read, seen.unreadable))
            for order in turn.orders:
                obey(self._own(order), engine, slots)
            output = engine.turn(turn.facts)
            self._outcome.add(turn.number, output.events)
            engine.settle()

    def _own(self, order: Order) -> Order:
        """An order as it is for this rank: files are where we have them."""
        match order:
            case Provide(_, manifest):
                return Provide(str(self._files[manifest.id][0]), manifest)
            case Withdraw(version):
                self._loop.call_soon_threadsafe(self._let_go, version)
        return order

    def _let_go(self, version: str) -> None:
        if (known := self._files.pop(version, None)) is not None:
            self._begin(known[1].aclose())


def _decoded(data: bytearray) -> object:
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise PeerError("rank 0 said what is no message") from error
