"""Bytes between two processes of a ring: a handshake by its secret, then frames that no other party can have written.

The server begins with a nonce, the client answers with its own and with a proof over both, and the server proves that
it knows the secret, too. Everything up to there has a fixed size: nothing of a stranger is parsed.

A frame is `sizes of head and body | MAC | head | body`. The MAC is keyed for this connection alone and covers the
sender, the frame's number, the sizes and the head. A message is all head (msgpack). A parcel of KV
(worker/engine/prefixes/parcels.py) has a body, whose SHA-256 stands in its head, so each byte is covered once. Nothing
is encrypted.

A reader waits STALL_S for the next ones at most.
"""

import asyncio
import hmac
import secrets
import socket
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

MAGIC = b"PLMKV001"
NONCE = 32
STALL_S = 5.0  # without a byte
HEAD_BYTES = 40 << 20  # of a frame, at most
ASK_BYTES = 8 << 20
PARCEL_BYTES = 1 << 30
CLOSED = "it closed the connection"  # also if it had not read all of ours: that resets the connection
_SIZES = 12  # 4 of the head's size, 8 of the body's
_MAC = 32
_CHUNK = 1 << 20  # handed to a socket at once

T = TypeVar("T")
M = TypeVar("M", bound=msgspec.Struct)


class PeerError(Exception):
    """The other worker does not do its part; the message says how."""


class PeerRefusalError(PeerError):
    """It is well, and gives nothing now."""


class Connection:
    """Raw bytes to and from one peer, which are waited for `stall_s` at most."""

    def __init__(self, sock: socket.socket, stall_s: float = STALL_S) -> None:
        sock.setblocking(False)
        self.stall_s = stall_s
        self._socket = sock
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Close the socket at once."""
        self._socket.close()

    async def read(self, size: int) -> bytearray:
        """Read exactly `size` bytes; PeerError if they do not come."""
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = await self._within(self._loop.sock_recv_into(self._socket, view[:_CHUNK]))
            if not count:
                raise PeerError(CLOSED)
            view = view[count:]
        return data

    async def write(self, data: bytes | memoryview) -> None:
        """All of it; not so much at once that a slow reader would look like one that stalls."""
        view = memoryview(data)
        if view.nbytes:
            view = view.cast("B")
        while view:
            await self._within(self._loop.sock_sendall(self._socket, view[:_CHUNK]))
            view = view[_CHUNK:]

    async def _within(self, step: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self.stall_s):
                return await step
        except TimeoutError as error:
            raise PeerError(f"it stalled for {self.stall_s:g} s") from error
        except ConnectionError as error:
            raise PeerError(CLOSED) from error
        except OSError as error:
            raise PeerError(f"the connection broke: {error.strerror or error}") from error


class Channel:
    """Frames to and from a peer that has proved that it belongs to the ring."""

    def __init__(self, connection: Connection, ours: bytes, theirs: bytes) -> None:
        self._connection = connection
        self.keys = self._ours, self._theirs = ours, theirs
        self._sent = self._received = 0

    async def say(self, message: msgspec.Struct) -> None:
        """Send one message as msgpack."""
        await self.send(msgspec.msgpack.encode(message))

    async def send(self, head: bytes, body: Sequence[memoryview] = ()) -> None:
        """Send a frame; what the body holds is the head's to vouch for."""
        sizes = len(head).to_bytes(4, "big") + sum(part.nbytes for part in body).to_bytes(8, "big")
        mac = await asyncio.to_thread(frame_mac, self._ours, self._sent, sizes, head)
        self._sent += 1
        await self._connection.write(sizes + mac + head)
        for part in body:
            await self._connection.write(part)

    async def hear(self, kind: type[M], most: int = ASK_BYTES) -> M:
        """Receive the next message, of at most `most` bytes."""
        data = await self.receive(most)
        try:
            return await asyncio.to_thread(msgspec.msgpack.decode, data, type=kind)
        except (msgspec.DecodeError, ValueError) as error:
            raise PeerError(f"it sent what is no {kind.__name__}") from error

    async def receive(self, most: int = PARCEL_BYTES) -> bytearray:
        """The next frame, head and body in one."""
        begin = await self._connection.read(_SIZES + _MAC)
        head_size, body_size = int.from_bytes(begin[:4], "big"), int.from_bytes(begin[4:_SIZES], "big")
        if head_size > HEAD_BYTES or head_size + body_size > most:
            raise PeerError(f"it announced {head_size + body_size} bytes, and {most} are the limit")
        data = await self._connection.read(head_size + body_size)
        head = memoryview(data)[:head_size]
        mac = await asyncio.to_thread(frame_mac, self._theirs, self._received, begin[:_SIZES], head)
        if not hmac.compare_digest(mac, begin[_SIZES:]):
            raise PeerError("it sent bytes that are not authentic")
        self._received += 1
        return data


async def greet(connection: Connection, secret: bytes, magic: bytes = MAGIC) -> Channel:
    """The client's part of the handshake; `magic` names the protocol, in 8 bytes."""
    begin = bytes(await connection.read(len(magic) + NONCE))
    if not begin.startswith(magic):
        raise PeerError("it does not speak as our workers do")
    ours = secrets.token_bytes(NONCE)
    nonces = begin + ours
    await connection.write(ours + _proof(secret, b"client", nonces))
    proof = await connection.read(_MAC)
    if not hmac.compare_digest(bytes(proof), _proof(secret, b"server", nonces)):
        raise PeerError("it does not know the secret of this ring")
    return Channel(connection, _proof(secret, b"from client", nonces), _proof(secret, b"from server", nonces))


async def admit(connection: Connection, secret: bytes, magic: bytes = MAGIC) -> Channel:
    """The server's part of the handshake."""
    begin = magic + secrets.token_bytes(NONCE)
    await connection.write(begin)
    answer = bytes(await connection.read(NONCE + _MAC))
    nonces = begin + answer[:NONCE]
    if not hmac.compare_digest(answer[NONCE:], _proof(secret, b"client", nonces)):
        raise PeerError("it does not know the secret of this ring")
    await connection.write(_proof(secret, b"server", nonces))
    return Channel(connection, _proof(secret, b"from server", nonces), _proof(secret, b"from client", nonces))


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, role + b"\n" + nonces, "sha256")


def frame_mac(key: bytes, number: int, sizes: bytes | bytearray, head: bytes | memoryview) -> bytes:
    """MAC of the frame with this number in one direction."""
    mac = hmac.new(key, number.to_bytes(8, "big") + sizes, "sha256")
    mac.update(head)
    return mac.digest()
