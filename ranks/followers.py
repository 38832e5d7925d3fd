"""The other ranks as rank 0 sees them: how they come in, and one connection pair each."""

import asyncio
import contextlib
import socket
import time
from typing import Self

import msgspec
import structlog

from ranks.channel import TurnsOut, shut
from ranks.messages import FromFollower, FromLead, Hello, ModelLoaded
from shared.machine.status import MachineStatus
from shared.ranks import RankState, RankStatus
from shared.wire import Channel, Connection, PeerError, admit

log = structlog.get_logger()

MAGIC = b"PLMGRP01"
HANDSHAKE_S = 5.0
LONG_S = 86_400.0
MAX_STRANGERS = 32  # connections without a proof yet
MAX_WAITING = 256  # that have one, and no place in the group
WORDS = 1 << 20  # bytes of what a follower says
_DECODER = msgspec.msgpack.Decoder(FromFollower)


class FollowerLink:
    """One rank: where to send it turns, and what it says."""

    def __init__(self, rank: int, host: str, turns: TurnsOut, talk: "Line") -> None:
        self.rank, self.host = rank, host
        self.turns = turns
        self.loaded: ModelLoaded | None = None
        self.turn = self.sum = 0  # the latest turn that it has taken, and what came of all so far
        self.failed = 0  # the latest unit that has failed there
        self.failure = ""  # why the first one has that has failed there alone, as far as is known
        self.failed_at = 0.0
        self._talk = talk
        self._quiet = 0
        self._machine = MachineStatus()
        talk.connection.stall_s = LONG_S  # `looked_at` counts its silence
        self._saying = asyncio.Lock()
        self._moved_at = self._heard_at = time.monotonic()

    async def say(self, message: FromLead) -> None:
        """Send the rank a message."""
        async with self._saying:
            await self._talk.channel.say(message)

    async def hear(self) -> object:
        """The next thing that it says; PeerError."""
        data = await self._talk.channel.receive(WORDS)
        self._heard_at, self._quiet = time.monotonic(), 0
        try:
            return _DECODER.decode(data)
        except (msgspec.DecodeError, ValueError) as error:
            raise PeerError("it said what is no message") from error

    def looked_at(self) -> int:
        """How often in a row it has been looked at without having said anything.

        Looks are counted, and not seconds: while this process is frozen itself, no other is silent.
        """
        self._quiet += 1
        return self._quiet - 1

    def progress(self, turn: int, sum_: int, machine: MachineStatus) -> None:
        """How far it has come, and how much memory it has left."""
        self._machine = machine
        if turn != self.turn:
            self._moved_at = time.monotonic()
        self.turn, self.sum = turn, sum_

    def behind_s(self, number: int, now: float) -> float:
        """For how long it has not moved on, with turns to take until that number; 0: there are none."""
        if self.turn >= number:
            self._moved_at = now
        return now - self._moved_at

    def status(self, backend: str, number: int, now: float, lost: str) -> RankStatus:
        """For the heartbeat, when so many turns have begun."""
        state: RankState = "lost" if lost.startswith(f"rank {self.rank} ") else "ready" if self.loaded else "loading"
        silent_s = round(now - self._heard_at, 1)
        behind = max(0, number - self.turn)
        return RankStatus(self.rank, self.host, self._talk.address, backend, state, behind, silent_s, self._machine)

    def close(self) -> None:
        """Close both connections at once."""
        self.turns.close()
        shut(self._talk.sock)


class Line:
    """A connection whose other end has proved the secret."""

    def __init__(self, sock: socket.socket, connection: Connection, channel: Channel) -> None:
        self.sock, self.connection, self.channel = sock, connection, channel
        self.address = "?"
        with contextlib.suppress(OSError):
            self.address = str(sock.getpeername()[0])


class Reception:
    """Listens while the group gathers; what has not been taken at its end is closed."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._listening: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers = 0
        self._lines: dict[tuple[str, str], Line] = {}  # by nonce and what it is for

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listening is not None:
            self._listening.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for line in self._lines.values():
            shut(line.sock)

    def listen(self, host: str) -> int:
        """Begin; the port. OSError where this is no address of this machine."""
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listening = socket.create_server((host, 0), family=family, backlog=64)
        self._listening.setblocking(False)
        self._begin(asyncio.create_task(self._accept(self._listening)))
        return int(self._listening.getsockname()[1])

    def complete(self) -> frozenset[str]:
        """Nonces of those that have both connections."""
        return frozenset(nonce for nonce, line in self._lines if line == "talk" and (nonce, "turns") in self._lines)

    def take(self, rank: int, nonce: str, host: str) -> FollowerLink:
        """Take over the two connections of one rank."""
        turns, talk = self._lines.pop((nonce, "turns")), self._lines.pop((nonce, "talk"))
        return FollowerLink(rank, host, TurnsOut(turns.sock, turns.channel.keys[0]), talk)

    def _begin(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listening)
            if self._strangers >= MAX_STRANGERS or len(self._lines) >= MAX_WAITING:
                sock.close()
                continue
            self._begin(asyncio.create_task(self._let_in(sock)))

    async def _let_in(self, sock: socket.socket) -> None:
        self._strangers += 1
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                connection = Connection(sock, HANDSHAKE_S)
                channel = await admit(connection, self._secret, MAGIC)
                hello = await channel.hear(Hello)
        except (PeerError, TimeoutError) as error:
            log.warning("group.not_let_in", reason=str(error) or "it did not say who it is")
            sock.close()
            return
        except BaseException:
            sock.close()
            raise
        finally:
            self._strangers -= 1
        known = self._lines.get((hello.nonce, hello.line))
        self._lines[hello.nonce, hello.line] = Line(sock, connection, channel)
        if known is not None:
            shut(known.sock)
