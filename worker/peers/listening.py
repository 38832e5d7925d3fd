"""Listens for other processes of a ring: strangers are cut off, the others are answered, each on its own connection.

Invariants. A peer that has not proved within HANDSHAKE_S that it knows the secret is cut off, and has learned nothing.
An answer takes `answer_s` at most. No MLX here: a host listens, too.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import structlog

from shared.errors import SetupError
from shared.machine.network import Info, in_order, words_of
from shared.redis.connection.address import own_address
from shared.wire import MAGIC, Channel, Connection, PeerError, admit

log = structlog.get_logger()

HANDSHAKE_S = 3.0
MAX_STRANGERS = 32  # connections without a proof yet
CONNECT_S = 2.0
EVERYWHERE = ("0.0.0.0", "::", "*")


class Listener:
    """One listening socket and its connections."""

    def __init__(
        self,
        secret: Callable[[], bytes],
        answer: Callable[[Channel], Awaitable[None]],
        failed: Callable[[str, str], None],
        *,
        answer_s: float,
        magic: bytes = MAGIC,
    ) -> None:
        """`secret`: b"" admits nobody. `failed`: is called with a peer's address and the reason."""
        self._secret, self._answer, self._failed = secret, answer, failed
        self._answer_s, self._magic = answer_s, magic
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers = 0

    def listen(self, host: str) -> int:
        """Begin; the port. OSError where this is no address of this machine."""
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listening = socket.create_server((host, 0), family=family, backlog=64)
        self._listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listening))
        return int(self._listening.getsockname()[1])

    async def close(self) -> None:
        """Stop accepting and close all connections."""
        tasks = [task for task in (self._accepting, *self._tasks) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:  # no descriptors, say
                log.warning("peers.cannot_accept", error=error.strerror or str(error))
                await asyncio.sleep(0.5)
                continue
            if self._strangers >= MAX_STRANGERS or not self._secret():
                sock.close()
                continue
            task = asyncio.create_task(self._serve(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket) -> None:
        peer = _shown(sock)
        connection = Connection(sock)
        try:
            channel = await self._let_in(connection)
            async with asyncio.timeout(self._answer_s):
                await self._answer(channel)
        except TimeoutError:
            self._failed(peer, f"not done within {self._answer_s:.0f} s")
        except PeerError as error:
            self._failed(peer, str(error))
        except Exception as error:
            log.exception("peers.serving_failed", peer=peer)
            self._failed(peer, type(error).__name__)
        finally:
            connection.close()

    async def _let_in(self, connection: Connection) -> Channel:
        self._strangers += 1
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                return await admit(connection, self._secret(), self._magic)
        except TimeoutError:
            raise PeerError("it did not say who it is") from None
        finally:
            self._strangers -= 1


def listen_for(others: str, listen: Callable[[str], int], redis: str, wish: str, flag: str) -> str:
    """Begin to listen at an address that other machines can reach; it is `host:port`.

    `listen`: begins at a host, and returns the port. `wish`: --kv-transfer-host; "" for the address at which this
    machine reaches `redis`. SetupError where this is no address of this machine; it names `others` and `flag`.
    """
    if wish in EVERYWHERE:
        raise SetupError(f"--kv-transfer-host {wish}: this is no address at which other {others} could connect")
    try:
        host = own_address(redis, wish)
        return f"{host}:{listen(host)}"
    except OSError as error:
        raise SetupError(
            f"{f'--kv-transfer-host {wish}' if wish else flag}: cannot listen there for the other {others}: "
            f"{error.strerror or error}; give an address of this machine with --kv-transfer-host"
        ) from error


async def connected(host: str, port: int) -> socket.socket:
    """A connection to a peer, at the first of its addresses that answers. PeerError."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_S):
            trouble: OSError | None = None
            for found in in_order(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)):
                try:
                    return await _connect_to(found)
                except OSError as error:  # another address may answer
                    trouble = trouble or error
            raise trouble or OSError("it has no address")
    except TimeoutError as error:
        raise PeerError(f"it does not answer within {CONNECT_S:.0f} s") from error
    except OSError as error:
        raise PeerError(f"it cannot be reached: {words_of(error, error.strerror or str(error))}") from error


async def _connect_to(found: Info) -> socket.socket:
    family, kind, protocol, _, address = found
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _shown(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return "?"
