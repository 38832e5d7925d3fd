"""The channel of turns: from rank 0's thread G to a follower's, blocking, in order, each frame authentic.

A frame is `size | MAC | msgpack`. The MAC covers the frame's number, so that none can be left out or come twice.
"""

import contextlib
import hmac
import socket
import zlib
from collections.abc import Sequence

import msgspec

from ranks.messages import EngineTurn, Unit, UnitPart
from shared.frames import TokenEvent
from shared.wire import CLOSED, frame_mac

LARGEST = 256 << 20  # bytes of a turn's orders
FAILED = b"failed"  # what comes of a unit of work then
_SIZE = 4
_MAC = 32


class ChannelError(Exception):
    """The other end has gone, or says what it cannot have said."""


class TurnsOut:
    """Rank 0's end of one follower's channel."""

    def __init__(self, sock: socket.socket, key: bytes) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._key, self._sent = sock, key, 0

    def send(self, data: bytes) -> None:
        """A turn, encoded; ChannelError. Waits while the follower is far behind."""
        size = len(data).to_bytes(_SIZE, "big")
        mac = frame_mac(self._key, self._sent, size, data)
        self._sent += 1
        try:
            self._socket.sendall(size + mac + data)
        except OSError as error:
            raise ChannelError(f"it cannot be reached: {error.strerror or error}") from error

    def close(self) -> None:
        """At once, also while another thread sends."""
        shut(self._socket)


class TurnsIn:
    """A follower's end of the channel."""

    def __init__(self, sock: socket.socket, key: bytes) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._key, self._received = sock, key, 0
        self._decoder: msgspec.msgpack.Decoder[EngineTurn | Unit | UnitPart] = msgspec.msgpack.Decoder(
            EngineTurn | Unit | UnitPart
        )

    def next(self) -> EngineTurn | Unit:
        """The next turn or unit, which is waited for; ChannelError when there will be none."""
        parts: list[bytes] = []
        while isinstance(message := self._message(), UnitPart):
            parts.append(message.ask)
        if parts and isinstance(message, Unit):
            return Unit(message.number, b"".join([*parts, message.ask]))
        return message

    def _message(self) -> EngineTurn | Unit | UnitPart:
        begin = self._read(_SIZE + _MAC)
        size = int.from_bytes(begin[:_SIZE], "big")
        if size > LARGEST:
            raise ChannelError(f"it announced {size} bytes, and {LARGEST} are the limit")
        data = self._read(size)
        if not hmac.compare_digest(frame_mac(self._key, self._received, begin[:_SIZE], data), begin[_SIZE:]):
            raise ChannelError("it sent bytes that are not authentic")
        self._received += 1
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, ValueError) as error:
            raise ChannelError("it sent what is no turn") from error

    def close(self) -> None:
        """At once, also while another thread waits."""
        shut(self._socket)

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        try:
            while view:
                count = self._socket.recv_into(view)
                if not count:
                    raise ChannelError(CLOSED)
                view = view[count:]
        except ConnectionError as error:
            raise ChannelError(CLOSED) from error
        except OSError as error:
            raise ChannelError(f"the connection broke: {error.strerror or error}") from error
        return bytes(data)


def shut(sock: socket.socket) -> None:
    """Close a socket, and wake threads that wait for it."""
    with contextlib.suppress(OSError):  # it is not connected any more
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class OutcomeSum:
    """A sum over what came of all turns so far: equal on all ranks, or they are out of step."""

    def __init__(self) -> None:
        self.turn = 0
        self.sum = 0

    def add_unit(self, number: int, result: bytes) -> None:
        """Add the result of a unit of work to the sum."""
        if result:
            self.sum = zlib.crc32(result, self.sum)
        self.turn = number

    def add(self, number: int, events: Sequence[TokenEvent]) -> None:
        """Add the events of a turn to the sum."""
        if events:
            facts = [(event.seq, event.attempt, event.position, event.tokens, _end(event)) for event in events]
            self.sum = zlib.crc32(msgspec.msgpack.encode((number, facts)), self.sum)
        self.turn = number


def _end(event: TokenEvent) -> str:
    return "" if event.finish is None else event.finish.reason
